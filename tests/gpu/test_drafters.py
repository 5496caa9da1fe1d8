"""Drafters on a CUDA device: in graphs, a step ahead, and the same tokens as without drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.models.drafter_files import dflash, eagle3, mtp
from tests.models.families import make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_kv_blocks": 200,
    "device": "cuda",
    "dtype": "float32",
    "batch_invariant": True,
}
PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate([1, 5, 16, 17, 64, 150, 40, 9, 3])]
WIDE = {"head_dim": 16, "num_hidden_layers": 6}
"""Heads that the kernels for CUDA devices have."""


def _draft_model(folder: Path) -> dict[str, Any]:
    make_checkpoint(folder / "model", "llama/wide_heads", **WIDE)
    make_checkpoint(folder / "draft", "qwen3/wide_heads")
    return {"method": "draft_model"}


def _eagle3(folder: Path) -> dict[str, Any]:
    make_checkpoint(folder / "model", "llama/wide_heads", **WIDE)
    eagle3(folder / "draft", folder / "model", "authors", (2, 3, 3))
    return {"method": "eagle3"}


def _mtp(folder: Path) -> dict[str, Any]:
    mtp(folder / "model", "qwen3/wide_heads", "qwen")
    return {"method": "mtp"}


def _dflash(folder: Path) -> dict[str, Any]:
    make_checkpoint(folder / "model", "llama/wide_heads", **WIDE)
    dflash(folder / "draft", folder / "model", (0, 2), "authors")
    return {"method": "dflash"}


def generate(folder: Path, **settings: Any) -> tuple[list[list[int]], Any]:
    params = [
        SamplingParams(temperature=(0, 0.8)[i % 2], seed=i, max_tokens=60, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    with LLM(str(folder), **{**SETTINGS, **settings}) as llm:
        found = [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]
        llm.engine.check()
        return found, llm.engine.stats()


@pytest.mark.parametrize("make", [_draft_model, _eagle3, _mtp, _dflash])
def test_tokens_are_those_without_drafts(tmp_path: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    config = {**make(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    if config["method"] != "mtp":
        config["model"] = str(tmp_path / "draft")
    want, _ = generate(tmp_path / "model")
    for settings in ({}, {"num_kv_blocks": 26}, {"enforce_eager": True}, {"async_scheduling": False}):
        found, stats = generate(tmp_path / "model", **settings, speculative_config=config)
        assert found == want
        assert stats.num_drafts > 0


def test_a_model_accepts_what_it_drafts_itself(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama/wide_heads", **WIDE)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    _, stats = generate(tmp_path, speculative_config=config)
    assert stats.num_accepted_drafts >= 0.99 * stats.num_drafts > 0
