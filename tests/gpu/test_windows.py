"""Models of windows on a CUDA device, with blocks for little more than one of them. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.gpu.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WINDOW, STEP = 20, 48
PROMPTS = [[(7 * i + 3 * j) % 128 for j in range(length)] for i, length in enumerate([300, 5, 150, 64, 301])]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Mistral."""
    return write_checkpoint(tmp_path_factory.mktemp("mistral"), "mistral", sliding_window=WINDOW)


def generate(folder: Path, device: str, **settings: Any) -> list[list[int]]:
    sizes = {"block_size": 16, "max_num_batched_tokens": STEP, "max_num_seqs": 4, **settings}
    with LLM(str(folder), device=device, dtype="float32", **sizes) as llm:
        results = [*llm.generate(PROMPTS, GREEDY), *llm.generate([*PROMPTS, PROMPTS[0] + PROMPTS[2]], GREEDY)]
        llm.engine.check()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def hybrid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen 2, of whose four layers the last two have windows."""
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", num_hidden_layers=4, **windows)


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}, {"enforce_eager": True}], ids=str)
@pytest.mark.parametrize("num_blocks", [26, 34, 200])
def test_two_pools_give_the_tokens_of_the_cpu(
    hybrid_checkpoint: Path, num_blocks: int, settings: dict[str, Any]
) -> None:
    """The first sizes are those of the longest prompt and its answer, and of little more."""
    limits = {"num_kv_blocks": num_blocks, "max_model_len": 512, "max_num_seqs": 2}
    expected = generate(hybrid_checkpoint, "cpu", num_kv_blocks=200, kv_offload_memory=0.01)
    assert generate(hybrid_checkpoint, "cuda", **limits, **settings) == expected


@pytest.mark.parametrize("num_blocks", [8, 14, 200])
def test_few_blocks_give_the_tokens_of_the_cpu(checkpoint: Path, num_blocks: int) -> None:
    expected = generate(checkpoint, "cpu", num_kv_blocks=200)
    assert generate(checkpoint, "cuda", num_kv_blocks=num_blocks, max_model_len=512) == expected
