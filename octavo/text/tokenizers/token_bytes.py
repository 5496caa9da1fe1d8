"""The bytes of every token, computed once from a vocabulary and the kind of its decoder.

Two families cover the models served here. *Byte-level* vocabularies (GPT-2 and its successors) write each byte as one
printable character. *SentencePiece-like* ones write a space as U+2581 and a byte without a piece as ``<0xNN>``. Text
is then always the UTF-8 decoding of joined bytes, which makes incremental decoding possible.

Encoder models use *WordPiece* vocabularies, in which ``##`` marks a piece that continues a word. Every other piece
gets a leading space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from octavo.errors import CheckpointError

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
MAX_TOKEN_ID = 1 << 24
"""Bounds the memory of the table of all tokens, to 128 MiB; the largest vocabularies have 2**18 tokens."""
_SENTENCEPIECE_STEPS = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's ``bytes_to_unicode``).

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, are U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def token_bytes_table(backend: tokenizers.Tokenizer, origin: object) -> list[bytes]:
    """Bytes of each token, by id; empty for ids that the vocabulary does not use.

    Raises ``CheckpointError``, naming ``origin`` and the decoder, when the decoder is of another kind
    (CTC, ...): its text is not the concatenation of its tokens. Or if an id is above ``MAX_TOKEN_ID``.
    """
    spell = _speller(backend, origin)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest > MAX_TOKEN_ID:
        raise CheckpointError(f"{origin}: the tokenizer has a token with the id {largest}; the limit is {MAX_TOKEN_ID}")
    table = [b""] * (largest + 1)
    for token, index in vocabulary.items():
        table[index] = spell(token)
    return table


def _speller(backend: tokenizers.Tokenizer, origin: object) -> Callable[[str], bytes]:
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and {"ByteLevel", "Fuse"}.issuperset(kinds):
        return _byte_level_speller()
    marks_space = any(_marks_space(step) for step in steps)
    if marks_space and _SENTENCEPIECE_STEPS.issuperset(kinds):
        return _sentencepiece_speller(has_byte_pieces="ByteFallback" in kinds)
    if kinds == ["WordPiece"]:
        return _wordpiece_speller(steps[0]["prefix"])
    raise CheckpointError(
        f"{origin}: the tokenizer's decoder is {' + '.join(kinds) or 'missing'}; "
        "only byte-level, SentencePiece-like and WordPiece decoders can be handled"
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as tokenizer.json spells it, as a flat list of steps."""
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _marks_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == SPACE_MARK)
    return step == {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}


def _byte_level_speller() -> Callable[[str], bytes]:
    alphabet = byte_level_alphabet()

    def spell(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # an added token: its bytes are the text that it matches
            return token.encode("utf-8", "replace")

    return spell


def _wordpiece_speller(mark: str) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        text = token.removeprefix(mark) if token.startswith(mark) else " " + token
        return text.encode("utf-8", "replace")

    return spell


def _sentencepiece_speller(has_byte_pieces: bool) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        if has_byte_pieces and (piece := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(piece[1], 16)])
        return token.replace(SPACE_MARK, " ").encode("utf-8", "replace")

    return spell
