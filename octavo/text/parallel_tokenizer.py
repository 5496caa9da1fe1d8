"""Tokenises a long text in several threads, each of which takes a chunk of it.

Chunks end before a space between two ASCII letters. The token ids are those of the unsplit text if no token of the
vocabulary contains a letter followed by a space, since then no merge joins the two, and if the pre-tokenizer splits
both sides as it does in the unsplit text. Pre-tokenizers of today's models look ahead by one character at most, so one
random text shows whether that holds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import tokenizers
from tokenizers import models

from octavo.errors import InvalidParameter
from octavo.system.cpus import num_cpus

MIN_CHUNK = 8192
"""Characters of a chunk, at least: they take milliseconds, and handing work to a thread a tenth of one."""
MAX_SEARCH = 4096
"""Characters in which a boundary is looked for; without one, the chunk before becomes longer."""
_BOUNDARY = re.compile(r"[A-Za-z](?= [A-Za-z])")
_LETTER_AND_SPACE = re.compile(rb"[A-Za-z] ")
_PROBE_WORDS = (*"abMZ", *"  \n\t\r", *"019", *"'.,-/_(", "'s", "'ll", "é", "\u0301", "中", "م", "ſ", "😀", "\u00a0")
_PROBE_LENGTH = 8_000


Encode = Callable[[list[str]], list[tokenizers.Encoding]]
"""Encodes texts without special tokens around them, outside the interpreter lock. Raises ``InvalidParameter``."""


class ParallelTokenizer:
    """Tokenises long texts in several threads; the token ids are those of the unsplit text."""

    def __init__(self, backend: tokenizers.Tokenizer, encode: Encode) -> None:
        """``backend``: one for which ``can_split``."""
        self._backend, self._encode = backend, encode
        self._num_threads = num_cpus()

    def takes(self, text: str) -> bool:
        """Whether this text is long enough for two chunks, and there are several CPUs for them."""
        return len(text) >= 2 * MIN_CHUNK and self._num_threads > 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids, with the special tokens that surround a text if asked for."""
        chunks = _chunks(text, min(self._num_threads, len(text) // MIN_CHUNK))
        before, after = self._around if add_special_tokens else ([], [])
        return [*before, *(token for ids in self._threads.map(self._encode_chunk, chunks) for token in ids), *after]

    def _encode_chunk(self, chunk: str) -> list[int]:
        return list(self._encode([chunk])[0].ids)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, "tokenise")

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        around = self._backend.encode("a")
        start = around.special_tokens_mask.index(0)
        end = len(around.ids) - around.special_tokens_mask[::-1].index(0)
        return list(around.ids[:start]), list(around.ids[end:])


def can_split(backend: tokenizers.Tokenizer, tokens: Iterable[bytes], encode: Encode) -> bool:
    """Whether splitting a text changes none of its tokens. ``tokens``: the bytes of all, added ones as well."""
    if not isinstance(backend.model, models.BPE) or backend.model.dropout or any(map(_LETTER_AND_SPACE.search, tokens)):
        return False
    if not encode(["a"])[0].ids:  # a vocabulary without letters
        return False
    added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    if any(token.rstrip and token.content[-1].isalpha() for token in added):
        return False
    words = [*_PROBE_WORDS, *(token.content for token in added[:8])]
    probe = "".join(random.Random(0).choices(words, k=_PROBE_LENGTH))
    try:
        (unsplit,) = encode([probe])
        chunks = encode(list(_split_at(probe, _boundaries(probe))))
    except InvalidParameter:
        return False
    return list(unsplit.ids) == [token for chunk in chunks for token in chunk.ids]


def _boundaries(text: str) -> Iterator[int]:
    return (found.end() for found in _BOUNDARY.finditer(text))


def _chunks(text: str, most: int) -> list[str]:
    """Up to ``most`` chunks of about the same length."""
    boundaries = []
    for number in range(1, most):
        target = number * len(text) // most
        found = _BOUNDARY.search(text, target, target + MAX_SEARCH)
        if found is not None:
            boundaries.append(found.end())
    return list(_split_at(text, boundaries))


def _split_at(text: str, boundaries: Iterable[int]) -> Iterator[str]:
    start = 0
    for end in boundaries:
        yield text[start:end]
        start = end
    yield text[start:]
