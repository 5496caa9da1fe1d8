"""A checkpoint that loads in milliseconds: random weights, and a tokenizer with one token for each byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from octavo.text.tokenizers.token_bytes import byte_level_alphabet

END = "<|end|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MAX_MODEL_LEN = 256
SETTINGS: dict[str, Any] = {"load_format": "dummy", "num_kv_blocks": 64, "block_size": 16, "max_num_batched_tokens": 64}
"""What ``LLM`` needs to be small as well."""


def write_checkpoint(folder: Path, with_tokenizer: bool = True) -> Path:
    """Write the configuration, and the tokenizer unless it shall do without."""
    alphabet = byte_level_alphabet()
    characters = sorted(alphabet, key=alphabet.__getitem__)
    vocabulary = {character: index for index, character in enumerate(characters)} | {END: 256}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 256,
        "tie_word_embeddings": False,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if with_tokenizer:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens([tokenizers.AddedToken(END, special=True)])
        tokenizer.save(str(folder / "tokenizer.json"))
        details = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(details))
    return folder
