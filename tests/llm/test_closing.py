"""An engine that is closed, or was never ready, does nothing more: what uses the device beside its steps has ended.

On a GPU a capture, and another engine's wait for the device, would break each other. Here the executor for GPUs runs on
the CPU, and what it compiles and captures are pauses.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.build import build_engine
from octavo.build.build_executor import ExecutorParts
from octavo.config import ModelSettings
from octavo.engine.runner.graph_dispatcher import PREPARING
from octavo.errors import ConfigError
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.runtime.kv_storage import KVStorage
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Compile, Reply, Step
from octavo.system.background_threads import stop_if_ending

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 64,
    "load_format": "dummy",
}
SECONDS = 20.0


class Pieces:
    """What was compiled and captured."""

    def __init__(self) -> None:
        self.num_begun = {Compile: 0, Step: 0}
        self.num_done = {Compile: 0, Step: 0}

    def do(self, kind: type) -> None:
        self.num_begun[kind] += 1
        time.sleep(0.02)
        self.num_done[kind] += 1


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieces]:
    """Of engines that are built in the test."""
    found = Pieces()

    class SlowExecutor(StreamExecutor):
        def _compile(self, message: Compile) -> None:
            for _ in message.shapes:
                stop_if_ending()
                found.do(Compile)

        def _step(self, message: Step) -> Reply[Any]:
            if message.uses_graph:
                found.do(Step)
            return super()._step(message)

    def make(
        settings: ModelSettings, model: Any, storage: KVStorage, vocab_size: int, most: StepLimits, parts: ExecutorParts
    ) -> StreamExecutor:
        return SlowExecutor(model, storage, vocab_size, most)

    monkeypatch.setattr(build_engine, "make_executor", make)
    with dispatch.only(REFERENCE):
        yield found
    assert not working()


def working() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in (PREPARING, "compile")]


def wait_until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


@pytest.mark.parametrize("kind", [Compile, Step])
def test_a_closed_engine_does_nothing_more(pieces: Pieces, tiny_checkpoint: Path, kind: type) -> None:
    with LLM(tiny_checkpoint, **SETTINGS):
        first = pieces.num_begun[kind]
        wait_until(lambda: pieces.num_begun[kind] > first)
        assert working()
    assert not working(), "it is still used"
    assert pieces.num_begun == pieces.num_done


def test_an_engine_that_cannot_be_built_leaves_nothing_behind(pieces: Pieces, tiny_checkpoint: Path) -> None:
    apart, before = {"role": "prefill", "kv_transfer_key": "0123456789abcdef"}, {*threading.enumerate()}
    with pytest.raises(ConfigError, match="step_log"):
        LLM(tiny_checkpoint, step_log=str(tiny_checkpoint / "no" / "folder"), **apart, **SETTINGS)
    assert pieces.num_begun[Step], "the engine failed too early"
    assert not working()
    others = {*threading.enumerate()} - before
    assert not [thread for thread in others if thread.name == "kv-transfer"], "it listens"


def test_an_engine_that_is_forgotten_stops_at_the_next_piece(pieces: Pieces, tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, **SETTINGS)
    wait_until(working)
    num_captured = pieces.num_begun[Step]
    del llm
    gc.collect()
    wait_until(lambda: not working())
    assert pieces.num_begun[Step] == num_captured, "it went on to compile everything, and to capture"
