"""A model that loads in a moment: random weights, and a context that holds prompts of a few hundred tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from octavo_bench.dummy_models import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tokenizer

VOCAB_SIZE = 1024
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": VOCAB_SIZE - len(SPECIAL_TOKENS),
    "tie_word_embeddings": False,
}
ADAPTER_MAPS = ("q_proj", "v_proj")
ADAPTER_RANK = 4
ADAPTER_SCALE = 0.3
"""Standard deviation of an adapter's weights: its texts are others than the model's."""


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write configuration, with ``changes``, and tokenizer for ``--load-format dummy``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    make_tokenizer(VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    details = {"eos_token": SPECIAL_TOKENS[0], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(details))
    return folder


def write_tiny_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of the tiny model; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, hidden = np.random.default_rng(0), CONFIG["hidden_size"]
    heads = {"q_proj": CONFIG["num_attention_heads"], "v_proj": CONFIG["num_key_value_heads"]}
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name in ADAPTER_MAPS:
            size = hidden // CONFIG["num_attention_heads"] * heads[name]
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (ADAPTER_RANK, hidden)), ("lora_B", (size, ADAPTER_RANK))):
                weights = rng.standard_normal(shape, dtype=np.float32) * np.float32(ADAPTER_SCALE)
                tensors[f"{place}.{part}.weight"] = weights
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": ADAPTER_MAPS}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
