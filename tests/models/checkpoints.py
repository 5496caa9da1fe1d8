"""Small random Llama checkpoints made by transformers, and a reader of them that is independent of octavo's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_parameters": LLAMA3},
}


def make_checkpoint(folder: Path, variant: str) -> LlamaForCausalLM:
    """Write a variant to the folder; returns the float32 model that it holds."""
    torch.manual_seed(sorted(VARIANTS).index(variant))
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **VARIANTS[variant]}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # else all ones: mistakes would not show
                weight.add_(torch.randn_like(weight) * 0.3)
    model.eval().save_pretrained(folder)
    return model


class FolderSource:
    """A checkpoint folder, read by the safetensors package."""

    is_dummy = False

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")

    def names(self) -> set[str]:
        return set(self.tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return str(self.tensors[name].dtype), tuple(self.tensors[name].shape)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensors[name]
