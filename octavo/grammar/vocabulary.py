"""What grammars need to know of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

LONGEST_BYTES = 64
"""Longer tokens are rare, and mostly rulers of blanks; texts are not cut into them."""


class Vocabulary(NamedTuple):
    """Tokens as bytes, and which of them are more than that."""

    tokens: list[bytes]
    """By id; empty where there is no token."""
    special_ids: list[int]
    """Tokens that stand for no text: only a grammar that names one allows it."""
    eos_ids: list[int]
    """Tokens that may end a text that is complete."""
    encode: Callable[[str], list[int]] | None = None
    """How a model would write a text; ``None`` when it is enough that it can be written somehow."""


class PackedVocabulary(NamedTuple):
    """A vocabulary on its way to another process. Packing looks at every token, so it is done once and ahead."""

    tokens: bytes
    """What ``pack_tokens`` made."""
    special_ids: list[int]
    eos_ids: list[int]


pack_tokens: Callable[[list[bytes]], bytes] = msgspec.msgpack.Encoder().encode
unpack_tokens: Callable[[bytes], list[bytes]] = msgspec.msgpack.Decoder(list[bytes]).decode


class Splitter:
    """Cuts bytes into tokens whose bytes they are, none of them special, in the model's own way where it has one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._encode = vocabulary.encode
        self._special_ids = frozenset(vocabulary.special_ids)
        plain = ((token, data) for token, data in enumerate(vocabulary.tokens) if token not in self._special_ids)
        self._ids = {data: token for token, data in plain if 0 < len(data) <= LONGEST_BYTES}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of ``text`` as far as it can be cut."""
        data = text.encode() if isinstance(text, str) else text
        own = self._own(data)
        return self._longest_first(data) if own is None else own

    def _own(self, data: bytes) -> list[int] | None:
        """The model's way; ``None`` when it has none, or adds something, or takes a part for a special token."""
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
