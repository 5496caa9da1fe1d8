"""``octavo.train`` on a CUDA device: the bits of sampling with ``batch_invariant``, and the gradients of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.train import Policy
from tests.llm.test_train import check_bits, check_equal, gradients
from tests.llm.test_weight_updates import SETTINGS
from tests.models.families import make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = {"device": "cuda", "batch_invariant": True, "block_size": 16}


@pytest.mark.parametrize("row", ["llama/gqa", "qwen3/wide_heads", "gemma2/capped"])
@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}, {"logprobs_mode": "processed_logprobs"}], ids=str)
def test_bits_are_those_of_sampling(row: str, settings: dict[str, Any], tmp_path: Path) -> None:
    check_bits(row, {**CUDA, **settings}, True, tmp_path)


def test_bits_of_sums_in_several_parts(tmp_path: Path) -> None:
    """As products with many inputs have."""
    check_bits("llama/gqa", CUDA, True, tmp_path, hidden_size=256, intermediate_size=512)


@pytest.mark.parametrize("row", ["llama/biases", "gemma2/capped", "granite_swa/sinks", "mistral/window"])
def test_gradients_are_those_of_a_cpu(row: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)
    expected = gradients(Policy(tmp_path, **SETTINGS))
    found = gradients(Policy(tmp_path, recomputes_layers=True, **{**SETTINGS, **CUDA, "dtype": "float32"}))
    check_equal(found, expected, 1e-3)
