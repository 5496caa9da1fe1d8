"""The vocabulary of a tokenizer, for grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

LONGEST_BYTES = 64
"""Longer tokens are rare, mostly runs of spaces; ``Splitter`` does not use them."""


class Vocabulary(NamedTuple):
    """Bytes of all tokens, and which are special."""

    tokens: list[bytes]
    """By id; empty for unused ids."""
    special_ids: list[int]
    """Tokens without text, allowed only where a grammar names them."""
    eos_ids: list[int]
    """Tokens that may end a complete text."""
    encode: Callable[[str], list[int]] | None = None
    """The model's own encoding of a text; ``None`` when any encoding will do."""


class PackedVocabulary(NamedTuple):
    """A vocabulary serialised for another process. Packing visits every token, so it is done once, in advance."""

    tokens: bytes
    """Result of ``pack_tokens``."""
    special_ids: list[int]
    eos_ids: list[int]


pack_tokens: Callable[[list[bytes]], bytes] = msgspec.msgpack.Encoder().encode
unpack_tokens: Callable[[bytes], list[bytes]] = msgspec.msgpack.Decoder(list[bytes]).decode


class Splitter:
    """Splits bytes into tokens, none of them special; uses the model's own encoding if there is one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._encode = vocabulary.encode
        self._special_ids = frozenset(vocabulary.special_ids)
        plain = ((token, data) for token, data in enumerate(vocabulary.tokens) if token not in self._special_ids)
        self._ids = {data: token for token, data in plain if 0 < len(data) <= LONGEST_BYTES}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of ``text``, up to the first byte that no token covers."""
        data = text.encode() if isinstance(text, str) else text
        own = self._own(data)
        return self._longest_first(data) if own is None else own

    def _own(self, data: bytes) -> list[int] | None:
        """The model's encoding; ``None`` if there is none, or it adds bytes or contains special tokens."""
        if self._encode is None:
            return None
        try:
            tokens = self._encode(data.decode())
        except UnicodeDecodeError:
            return None
        same = b"".join([self._tokens[token] for token in tokens]) == data
        return tokens if same and self._special_ids.isdisjoint(tokens) else None

    def _longest_first(self, data: bytes) -> list[int]:
        tokens = []
        place = 0
        while place < len(data):
            ends = range(min(place + LONGEST_BYTES, len(data)), place, -1)
            end = next((end for end in ends if data[place:end] in self._ids), None)
            if end is None:
                break
            tokens.append(self._ids[data[place:end]])
            place = end
        return tokens
