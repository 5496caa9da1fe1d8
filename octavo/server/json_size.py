"""Measures the size of a JSON text without decoding it.

Two bytes of JSON can decode to an object of a hundred bytes, in one call that holds the GIL. This scans the text in
pieces, so that other threads run in between.
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
    """Counts of syntax outside of strings; meaningful only for valid JSON."""

    num_values: int
    """Number of commas, which approximates the number of values."""
    num_containers: int
    """Objects, arrays, and members of objects."""
    depth: int


def measure(text: bytes, max_values: int = sys.maxsize, max_containers: int = sys.maxsize) -> Size:
    """The size of ``text``, or of a prefix that already exceeds one of the limits."""
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
