"""Small checkpoints of random weights, for comparisons between devices and ways of computing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}
"""Wide enough in its logits that no two tokens are nearly tied."""

NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
NUM_RANKS = [2, pytest.param(4, marks=NEEDS_FOUR)]
"""Two ranks share a GPU where there is one."""


def write_checkpoint(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write transformers' model of a type, of ``SHAPE`` but for ``changes``, to the folder, and return it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **changes})).save_pretrained(folder)
    return folder
