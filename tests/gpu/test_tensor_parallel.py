"""Ranks over memory that they map from each other, on one GPU that two share or on one each: kernels and engines."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo_kernels.cpu.rank_memory import make_memory
from tests.gpu.checkpoints import NUM_RANKS, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 1000
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "num_kv_blocks": 100,
    "max_num_batched_tokens": 256,
    "device": "cuda",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3, whose widths and query heads any number of ranks divides; four have copies of a KV head."""
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SHAPE)


@pytest.mark.parametrize("size", NUM_RANKS)
def test_ranks_sum_and_gather_over_peer_memory(size: int) -> None:
    descriptor = make_memory(size)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.rank_exchange", str(rank), str(size), str(descriptor)],
            pass_fds=[descriptor],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    os.close(descriptor)
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    assert len(set(printed)) == 1
    assert printed[0]


def generate(folder: Path, size: int, dtype: str, **settings: Any) -> list[Any]:
    rng = random.Random(1)
    prompts = [rng.choices(range(VOCAB), k=rng.randint(1, 300)) for _ in range(4)]
    kinds: list[dict[str, Any]] = [{"temperature": 0, "logprobs": 2}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}]
    params = [SamplingParams(**kinds[i % 2], seed=i, max_tokens=100, ignore_eos=True) for i in range(4)]
    every = {**SETTINGS, "tensor_parallel_size": size, "dtype": dtype, **settings}
    with LLM(str(folder), **every) as llm:
        assert llm.info.tensor_parallel_size == size
        return [result.outputs[0] for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("size", NUM_RANKS)
def test_ranks_give_the_tokens_of_one(checkpoint: Path, enforce_eager: bool, size: int) -> None:
    """In every step the ranks compare their results, and would end if they were not equal."""
    one = generate(checkpoint, 1, "float32", enforce_eager=enforce_eager)
    several = generate(checkpoint, size, "float32", enforce_eager=enforce_eager)
    for expected, found in zip(one, several, strict=True):
        assert list(found.token_ids) == list(expected.token_ids)
        if expected.logprobs:
            assert math.isclose(found.cumulative_logprob, expected.cumulative_logprob, abs_tol=1e-2)


@pytest.mark.parametrize("size", NUM_RANKS)
def test_bfloat16_ranks_agree_and_repeat(checkpoint: Path, size: int) -> None:
    """Chunks of prompts depend on times that were measured, so that results repeat with batch invariance only."""
    settings = {"dtype": "bfloat16", "batch_invariant": True}
    first, second = ([list(o.token_ids) for o in generate(checkpoint, size, **settings)] for _ in range(2))
    assert first == second
