"""Small random checkpoints made by transformers, and a reader of them that is independent of octavo's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
    "mha": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "qwen3": {"head_dim": 16},
}
CLASSES: dict[str, Any] = {
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}


def make_checkpoint(folder: Path, variant: str) -> PreTrainedModel:
    """Write a variant to the folder; returns the float32 model that it holds."""
    torch.manual_seed(sorted(VARIANTS).index(variant))
    values = {**SHAPE, **VARIANTS[variant]}
    model_class, config_class = CLASSES.get(variant, (LlamaForCausalLM, LlamaConfig))
    model: Any = model_class(config_class(**values))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):  # else all ones and zeros: mistakes would not show
                weight.add_(torch.randn_like(weight) * 0.3)
    model.eval().save_pretrained(folder)
    made: PreTrainedModel = model
    return made


class FolderSource:
    """A checkpoint folder, read by the safetensors package."""

    is_dummy = False

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")

    def names(self) -> set[str]:
        return set(self.tensors)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensors[name]
