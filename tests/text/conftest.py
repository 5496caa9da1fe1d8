"""Tokenizers that the tests of text share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tokenizers.gguf_tokenizer import parts_from_metadata
from octavo.text.tokenizers.sentencepiece_model import CONTROL, NORMAL
from octavo.text.tokenizers.token_bytes import byte_level_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a small byte-level vocabulary: 3 special tokens, 256 bytes, some merges."""
    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ"), ("1", "2"), ("Ð", "°"), ("ð", "Ł")]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL)),
        "merges": [f"{left} {right}" for left, right in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


def build(metadata: dict[str, Any]) -> Tokenizer:
    parts = parts_from_metadata(metadata, Path("test.gguf"))
    assert parts is not None
    return Tokenizer(parts)


@pytest.fixture(scope="session")
def small_tokenizer() -> Tokenizer:
    return build(byte_level_metadata())


@pytest.fixture(scope="session")
def smollm_tokenizer(default_model_path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer is not None
    return tokenizer
