"""Measures the size of a JSON text without decoding it.

Two bytes of JSON can decode to an object of a hundred bytes, in one call that holds the GIL. This scans the text in
pieces, so that other threads run in between.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

PIECE_BYTES = 64 << 10
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = tuple({91: 1, 123: 1, 93: -1, 125: -1}.get(byte, 0) for byte in range(256))


class Size(NamedTuple):
    """Counts of syntax outside of strings; meaningful only for valid JSON."""

    num_values: int
    """Number of commas, which approximates the number of values."""
    num_members: int
    """Members of objects."""
    num_containers: int
    """Objects, arrays, and members of objects."""
    depth: int


def measure(text: bytes, max_values: int = sys.maxsize, max_containers: int = sys.maxsize) -> Size:
    """The size of ``text``, or of a prefix that already exceeds one of the limits."""
    num_values = num_members = num_containers = depth = level = 0
    for piece in _outside_strings(text):
        num_values += piece.count(b",")
        num_members += (more := piece.count(b":"))
        num_containers += piece.count(b"[") + piece.count(b"{") + more
        if num_values > max_values or num_containers > max_containers:
            break
        if brackets := piece.translate(None, _NO_BRACKETS):
            levels = list(itertools.accumulate(map(_STEPS.__getitem__, brackets), initial=level))
            level, depth = levels[-1], max(depth, *levels)
    return Size(num_values, num_members, num_containers, depth)


def num_members(text: bytes) -> int:
    """Members of all objects in ``text``, which is valid JSON."""
    return sum(piece.count(b":") for piece in _outside_strings(text))


def repeated_name(text: bytes) -> str:
    """The first name that an object in ``text`` has twice, or ""; slow."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise _Repeated(next(name for name in names if names.count(name) > 1))

    try:
        json.loads(text, object_pairs_hook=check)
    except _Repeated as repeated:
        return str(repeated)
    return ""


class _Repeated(Exception):
    pass


def _outside_strings(text: bytes) -> Iterator[bytes]:
    if len(text) <= PIECE_BYTES:
        yield b" ".join(text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
        return
    is_inside = False
    rest = b""
    for start in range(0, len(text), PIECE_BYTES):
        piece = (rest + text[start : start + PIECE_BYTES]).replace(rb"\\", b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(rb"\"", b"").split(b'"')
        yield b" ".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
