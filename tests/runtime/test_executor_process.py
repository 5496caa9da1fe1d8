"""Messages are all that an executor knows: one in another process, fed with those of an engine, answers the same."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.runner.adapter_numbers import LoadedAdapters
from octavo.engine.runner.graph_dispatcher import GraphDispatcher
from octavo.engine.runner.step_runner import BlockMessages
from octavo.engine.scheduler import Scheduler
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import read_config
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import GraphLimits, exact_shape
from octavo.steps.messages import CopySlots, LoadAdapter, Message, Reply, Step, pack
from octavo.types import Request
from tests.models.adapter_files import make_adapter
from tests.models.checkpoints import FolderSource
from tests.models.families import VOCAB_SIZE, make_checkpoint
from tests.runtime.executor_process import (
    BLOCK_SIZE,
    EXECUTORS,
    LIMITS,
    MAX_ADAPTERS,
    NUM_BLOCKS,
    make_executor,
    make_storage,
)
from tests.runtime.making import make_runner
from tests.runtime.test_restricted_rows import EveryThird
from tests.speculating import last_known, speculating
from tests.tiers import nightly_after

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.2, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0, "min_tokens": 4, "stop_token_ids": (1, 2, 3), "logit_bias": {7: 2.0}},
    {"temperature": 0, "grammar": "every third"},
    {"temperature": 1, "allowed_token_ids": tuple(range(40)), "prompt_logprobs": 2},
]


class Recorder:
    """An executor whose messages and answers are kept as bytes."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.runs_ahead = executor.runs_ahead
        self.sent: list[bytes] = []
        self.messages: list[Message] = []
        self.replies: list[Reply[Any]] = []

    def send(self, message: Message) -> Reply[Any]:
        self.sent.append(pack(message))
        self.messages.append(message)
        reply = self.executor.send(message)
        return Kept(reply, self.replies)


class Kept:
    """A reply whose answer is asked for at once, as the executor's buffers are used again."""

    def __init__(self, reply: Reply[Any], kept: list[Any]) -> None:
        self._answer = reply.wait()
        kept.append(self._answer)

    def wait(self) -> Any:
        return self._answer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the other process: torch's products round differently with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "num_steps"), nightly_after(1, [(next(iter(EXECUTORS)), 90), *((kind, 150) for kind in EXECUTORS)])
)
def test_recorded_messages_give_the_same_bytes_in_another_process(kind: str, num_steps: int, tmp_path: Path) -> None:
    home, rng = tmp_path / "model", random.Random(3)
    make_checkpoint(home, "qwen2/windows")
    make_adapter(home, tmp_path / "adapter", 1, target_modules=["q_proj", "v_proj"], r=4)
    with dispatch.only(REFERENCE):
        storage = make_storage(home)
        recorder = Recorder(make_executor(kind, home, storage))
        engine = _engine(recorder, storage, home)
        engine.adapters.load("other", str(tmp_path / "adapter"))
        shared = rng.choices(range(VOCAB_SIZE), k=40)
        number = 0
        while sum(isinstance(message, Step) for message in recorder.messages) < num_steps:
            if rng.random() < 0.25 and engine.stats().num_waiting < 4:
                engine.add(_request(number, rng, shared))
                number += 1
            engine.step()
            engine.check()
    _check_variety(engine, recorder)
    (tmp_path / "messages").write_bytes(msgspec.msgpack.encode(recorder.sent))
    command = [sys.executable, "-m", "tests.runtime.executor_process", kind, home]
    subprocess.run([*map(str, command), tmp_path / "messages", tmp_path / "answers"], check=True, timeout=300)
    answers = msgspec.msgpack.decode((tmp_path / "answers").read_bytes(), type=list[bytes])
    assert answers == [msgspec.msgpack.encode(reply) for reply in recorder.replies]


def _engine(recorder: Recorder, storage: Any, home: Path) -> Engine:
    numbers: dict[str, int] = {}
    graphs = GraphDispatcher(GraphLimits(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, has_adapters=True))
    choose = graphs.choose if recorder.runs_ahead else exact_shape
    runner = make_runner(recorder, storage, VOCAB_SIZE, LIMITS, choose, numbers)
    groups = zip(NUM_BLOCKS, kv_groups(read_config(FolderSource(home).config).cache, max_window=1000), strict=True)
    cache = KVCache([GroupSize(count, group.window) for count, group in groups], BLOCK_SIZE)
    cache.copy_slots = BlockMessages(runner, 0).copy_slots
    scheduler = Scheduler(
        cache,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        speculation=speculating(lambda seq: [last_known(seq), 5] if seq.id % 3 == 0 else []),
    )
    adapters = LoadedAdapters(runner, numbers, MAX_ADAPTERS)
    depth = 2 if recorder.runs_ahead else 1
    return Engine(scheduler, runner, grammars=EveryThird(), adapters=adapters, depth=depth)


def _request(number: int, rng: random.Random, shared: list[int]) -> Request:
    prompt = shared[: rng.choice([0, 13, 30, 40])] + rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 5, 20]))
    params = SamplingParams(**rng.choice(KINDS))
    adapter = rng.choice(["", "", "other"])
    return Request(number, prompt, params, rng.choice([4, 12, 30]), number, adapter=adapter, cache_salt=adapter)


def _check_variety(engine: Engine, recorder: Recorder) -> None:
    """Else the comparison would show little."""
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_copied_tokens > 0
    assert stats.num_accepted_drafts > 0
    steps = [message for message in recorder.messages if isinstance(message, Step)]
    assert any(step.masks for step in steps)
    assert any(step.prompts for step in steps)
    assert any(step.histories for step in steps)
    assert any(step.shape.has_adapters for step in steps)
    kinds = {type(message) for message in recorder.messages}
    assert kinds >= {CopySlots, LoadAdapter, Step}
