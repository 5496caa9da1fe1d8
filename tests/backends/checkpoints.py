"""Tiny random checkpoints of architectures that Octavo has no model of, made by transformers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo_fleet.backends.vocabulary import TEMPLATE, VOCAB_SIZE

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "starcoder2": ("starcoder2", {"sliding_window": 7, "use_bias": True}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
    "granite": ("granite", {"logits_scaling": 4.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "helium": ("helium", {"head_dim": 8}),
    "bart": (
        "bart",
        {
            "decoder_layers": 2,
            "decoder_ffn_dim": 48,
            "decoder_attention_heads": 4,
            "encoder_layers": 1,
            "forced_eos_token_id": None,
        },
    ),
    "diffllama": ("diffllama", {}),
    "hrm_text": ("hrm_text", {"num_hidden_layers": 1, "num_key_value_heads": 4, "L_cycles": 2}),
    "youtu": ("youtu", {**MLA, "num_key_value_heads": 4}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "openai-gpt": ("openai-gpt", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}),
    "mamba": ("mamba", {"state_size": 8, "expand": 2, "time_step_rank": 4}),
}
PAGED = ("cohere", "starcoder2", "stablelm", "granite", "gpt_neox", "phi", "smollm3", "helium", "bart")
PAGED += ("diffllama", "hrm_text", "youtu")
"""Those whose attention runs over the paged cache; the others keep their own."""
OWN = ("bloom", "mamba", "openai-gpt")


def save_checkpoint(family: str, folder: Path) -> PreTrainedModel:
    """Write a checkpoint with a tokenizer of bytes to ``folder``; returns its model."""
    torch.manual_seed(zlib.crc32(family.encode()))
    kind, changes = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and "A_log" not in name and ".D" not in name:  # else all ones or zeros
                weight.add_(torch.randn_like(weight) * 0.3)
    model.eval().save_pretrained(folder)
    _save_tokenizer(folder)
    return model


def _save_tokenizer(folder: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from octavo.text.tokenizers.token_bytes import byte_level_alphabet
    from octavo_fleet.backends.toy_models import WORDS
    from octavo_fleet.backends.vocabulary import SPECIAL

    further = [*SPECIAL, *(f"\u0120{word}" for word in WORDS)]
    vocab = byte_level_alphabet() | {text: 256 + index for index, text in enumerate(further)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
