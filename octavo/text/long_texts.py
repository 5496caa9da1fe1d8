"""Encoding the parts of a long text at the same time.

A text is cut before a space between two ASCII letters. That changes no token if no token of the vocabulary goes across
such a place, as then no merge does, and if the pre-tokenizer splits both sides as it does without the cut. Those of
today's models look at the next character at most, so a random text shows whether it does.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import tokenizers
from tokenizers import models

LEAST_PART = 8192
"""Characters of a part, at least: so many take milliseconds, a thread that waits for work a tenth of one."""
FARTHEST_CUT = 4096
"""Characters from where a text should be cut to where it may be; beyond, the part before becomes longer."""
_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
_ACROSS = re.compile(rb"[A-Za-z] ")
_PROBE_WORDS = (*"abMZ", *"  \n\t\r", *"019", *"'.,-/_(", "'s", "'ll", "é", "\u0301", "中", "م", "ſ", "😀", "\u00a0")
_PROBE_LENGTH = 8_000


class LongTexts:
    """Encodes long texts in parts, to the tokens of the whole."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """``backend``: one for which ``may_cut``."""
        self._backend = backend
        self._num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def takes(self, text: str) -> bool:
        """Whether this text is long enough for two parts, and there are threads for them."""
        return len(text) >= 2 * LEAST_PART and self._num_threads > 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids, with the special tokens that surround a text if asked for."""
        parts = _parts(text, min(self._num_threads, len(text) // LEAST_PART))
        before, after = self._around if add_special_tokens else ([], [])
        return [*before, *(token for ids in self._threads.map(self._encode_part, parts) for token in ids), *after]

    def _encode_part(self, part: str) -> list[int]:
        return _encode(self._backend, [part])[0]

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, "encode")

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        around = self._backend.encode("a")
        start = around.special_tokens_mask.index(0)
        end = len(around.ids) - around.special_tokens_mask[::-1].index(0)
        return list(around.ids[:start]), list(around.ids[end:])


def may_cut(backend: tokenizers.Tokenizer, tokens: Iterable[bytes]) -> bool:
    """Whether texts may be cut without changing a token. ``tokens``: the bytes of all, added ones as well."""
    if not isinstance(backend.model, models.BPE) or backend.model.dropout or any(map(_ACROSS.search, tokens)):
        return False
    if not _encode(backend, ["a"])[0]:  # a vocabulary without letters
        return False
    added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    if any(token.rstrip and token.content[-1].isalpha() for token in added):
        return False
    words = [*_PROBE_WORDS, *(token.content for token in added[:8])]
    probe = "".join(random.Random(0).choices(words, k=_PROBE_LENGTH))
    (whole,) = _encode(backend, [probe])
    return whole == [token for ids in _encode(backend, list(_parts_at(probe, _cuts(probe)))) for token in ids]


def _encode(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The library's batch call releases the interpreter lock, its call for one text does not."""
    return [list(found.ids) for found in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _cuts(text: str) -> Iterator[int]:
    return (found.end() for found in _CUT.finditer(text))


def _parts(text: str, most: int) -> list[str]:
    """Up to ``most`` parts of about the same length."""
    cuts = []
    for number in range(1, most):
        wanted = number * len(text) // most
        found = _CUT.search(text, wanted, wanted + FARTHEST_CUT)
        if found is not None:
            cuts.append(found.end())
    return list(_parts_at(text, sorted(set(cuts))))


def _parts_at(text: str, cuts: Iterable[int]) -> Iterator[str]:
    start = 0
    for cut in cuts:
        yield text[start:cut]
        start = cut
    yield text[start:]
