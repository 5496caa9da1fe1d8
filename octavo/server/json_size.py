"""How much there is in a text of JSON, found without building any of it.

Two bytes of JSON make an object of a hundred, in one call that holds the interpreter's lock. This goes through the text
in pieces, between which other threads have their turn.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 64 << 10
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = tuple({91: 1, 123: 1, 93: -1, 125: -1}.get(byte, 0) for byte in range(256))


class Size(NamedTuple):
    """What is outside of strings; right for valid JSON, and some number for anything else."""

    num_values: int
    """Commas: as many as values, without a few."""
    num_containers: int
    """Objects, arrays, and members of objects."""
    depth: int


def measure(text: bytes, max_values: int = sys.maxsize, max_containers: int = sys.maxsize) -> Size:
    """The size of ``text``, or of its beginning as soon as that passes one of the bounds."""
    num_values = num_containers = depth = level = 0
    for piece in _outside_strings(text):
        num_values += piece.count(b",")
        num_containers += piece.count(b"[") + piece.count(b"{") + piece.count(b":")
        if num_values > max_values or num_containers > max_containers:
            break
        if brackets := piece.translate(None, _NO_BRACKETS):
            levels = list(itertools.accumulate(map(_STEPS.__getitem__, brackets), initial=level))
            level, depth = levels[-1], max(depth, *levels)
    return Size(num_values, num_containers, depth)


def _outside_strings(text: bytes) -> Iterator[bytes]:
    is_inside = False
    rest = b""
    for start in range(0, len(text), PIECE_BYTES):
        piece = (rest + text[start : start + PIECE_BYTES]).replace(rb"\\", b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(rb"\"", b"").split(b'"')
        yield b" ".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
