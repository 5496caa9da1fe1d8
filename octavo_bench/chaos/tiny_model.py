"""A model that loads in a moment: random weights, and a context that holds prompts of a few hundred tokens."""

from __future__ import annotations

import json
from pathlib import Path

from octavo_bench.dummy_models import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tokenizer

VOCAB_SIZE = 1024
CONFIG = {
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


def write_tiny_model(folder: Path) -> Path:
    """Write configuration and tokenizer for ``--load-format dummy``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    details = {"eos_token": SPECIAL_TOKENS[0], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(details))
    return folder
