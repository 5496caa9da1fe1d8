"""Engines that follow each other, or live side by side, in one process while graphs are left to capture."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.runner.graph_dispatcher import PREPARING
from octavo.ops.device_captures import wait_for_device
from tests.gpu.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "kv_cache_memory": 0.05,
}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MOST_SECONDS = 10.0
"""A close waits for a kernel or a graph, not for all."""
SECONDS_OF_WAITS = 20.0


def is_preparing() -> bool:
    return any(thread.name in (PREPARING, "compile") for thread in threading.enumerate())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", head_dim=64, hidden_size=128)


def tokens_of(llm: LLM) -> list[int]:
    return list(llm.generate([[1, 2, 3]], PARAMS)[0].outputs[0].token_ids)


@pytest.mark.parametrize("size", [1, 2])
def test_a_closed_engine_leaves_the_device_alone(checkpoint: Path, size: int) -> None:
    """Closed at once, while kernels are compiled, and later, while graphs are captured."""
    found, num_cut = list[list[int]](), 0
    for seconds in (0.0, 0.3, 1.0, 3.0, 6.0):
        llm = LLM(str(checkpoint), tensor_parallel_size=size, **SETTINGS)
        found.append(tokens_of(llm))
        time.sleep(seconds)
        num_cut += is_preparing()
        began = time.monotonic()
        llm.close()
        assert time.monotonic() - began < MOST_SECONDS
        assert not is_preparing()
        torch.cuda.synchronize()
    assert num_cut > 1, "nothing was left to be done"
    assert all(tokens == found[0] for tokens in found)


def test_an_engine_waits_for_the_device_while_another_captures_graphs(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        expected = tokens_of(llm)
        with LLM(str(checkpoint), **SETTINGS) as other:
            assert tokens_of(other) == expected
            num_waits, end = 0, time.monotonic() + SECONDS_OF_WAITS
            while is_preparing() and time.monotonic() < end:
                wait_for_device()
                num_waits += 1
                time.sleep(0.001)
            assert num_waits > 1
        assert tokens_of(llm) == expected
