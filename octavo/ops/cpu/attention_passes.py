"""The three passes of attention over one part of a context: see ``attention_tiles``.

What is worked on: ``queries`` float32 [rows, width] at ``positions`` int64 [rows], of neighbouring tokens in order, all
of one kv head; their ``scores`` float32 [rows, PART + 16] over the part; its ``runs``, as ``list_runs`` gave them; and
room for a run of float32 rows, ``copy``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.ops.cpu.attention_dots import (
    MAX_ROWS,
    SCORE_ROWS,
    STATE_BYTES,
    exponentials,
    gather,
    score,
    score_one,
    soft_cap,
)
from octavo.ops.cpu.compiled import inlined
from octavo.ops.cpu.half import widen
from octavo.ops.cpu.vector_ir import FLOAT32, FORMAT_BYTES, LANES

PART = 128
RUN = 64
"""Most positions at a time: their float32 keys stay in the first-level cache at usual head sizes."""
IN_PLACE_ROWS = 8
"""Most rows of a tile for which converting 16-bit numbers each time is quicker than a copy."""
COLUMN, COUNT, PLACE, ROOM = range(4)
"""Of a run: where it begins in its part; its positions; the row of the caches that holds the first; how many from there
on lie in the same block."""


@inlined
def first_seen(a: Any, position: int) -> Any:
    """The first position that a row at ``position`` sees."""
    return max(0, position - a.window + 1) if a.window else 0


@inlined
def list_runs(a: Any, table: Any, head: int, begin: int, end: int, runs: Any) -> Any:
    """Cut positions ``begin .. end`` into runs, each in one block; ``runs`` int64 [PART + 1, 4]. Gives their number."""
    index, within, n, column = begin // a.block_size, begin % a.block_size, 0, 0
    while begin + column < end:
        count = min(end - begin - column, a.block_size - within, RUN)
        runs[n, COLUMN], runs[n, COUNT] = column, count
        runs[n, PLACE] = (table[index] * a.K + head) * a.block_size + within
        runs[n, ROOM] = a.block_size - within
        n, column, within = n + 1, column + count, within + count
        if within == a.block_size:
            index, within = index + 1, 0
    return n


@inlined
def _are_read_in_place(number_format: int, a: Any, num_rows: int) -> bool:
    """Whether cached rows are multiplied as they are: for a few rows, it takes no longer to convert them each time."""
    return a.width == a.H and (number_format == FLOAT32 or num_rows <= IN_PLACE_ROWS)


@inlined
def _copy_rows(number_format: int, a: Any, rows: int, count: int, copy: Any) -> Any:
    """Bring ``count`` rows of a cache into ``copy`` as float32 rows of whole vectors; its address."""
    if a.width == a.H:
        widen(number_format, rows, copy.ctypes.data, count * a.H)
    else:
        for j in range(count):
            widen(number_format, rows + FORMAT_BYTES[number_format] * j * a.H, copy[j].ctypes.data, a.H)
    return copy.ctypes.data


@inlined
def score_rows(number_format: int, a: Any, begin: int, num_runs: int, work: Any) -> None:
    """First pass over the part from ``begin`` on: for each row scores of what it sees, and some that mean nothing."""
    queries, _, _, runs, copy = work
    row_bytes = FORMAT_BYTES[number_format] * a.H
    for i in range(num_runs):
        keys = a.k_cache + row_bytes * runs[i, PLACE]
        if _are_read_in_place(number_format, a, len(queries)):
            ahead = a.v_cache + row_bytes * runs[0, PLACE]
            if i + 1 < num_runs:
                ahead = a.k_cache + row_bytes * runs[i + 1, PLACE]
            _score_run(number_format, 1, a, begin, runs[i], keys, ahead, work)
        else:
            keys = _copy_rows(number_format, a, keys, runs[i, COUNT], copy)
            _score_run(FLOAT32, 0, a, begin, runs[i], keys, 0, work)


@inlined
def _score_run(kind: int, asks: int, a: Any, begin: int, run: Any, keys: int, ahead: int, work: Any) -> None:
    """Scores of one run's keys, of format ``kind``; if it ``asks``, as many bytes are brought near from ``ahead``."""
    queries, positions, scores, _, _ = work
    row_bytes, num_steps, strides = (
        FORMAT_BYTES[kind] * a.width,
        a.width // LANES,
        (queries.strides[0], scores.strides[0]),
    )
    for j in range(0, run[COUNT], LANES):
        start, here, asked = begin + run[COLUMN] + j, keys + row_bytes * j, ahead + row_bytes * j
        for first in range(0, len(queries), SCORE_ROWS):
            n = min(SCORE_ROWS, len(queries) - first)
            if start > positions[first + n - 1] or start + LANES <= first_seen(a, positions[first]):
                continue
            query, out = queries[first].ctypes.data, scores[first].ctypes.data + 4 * (run[COLUMN] + j)
            if j + LANES <= run[ROOM]:
                score(kind, asks, query, strides[0], n, here, num_steps, out, strides[1], asked)
                continue
            for row in range(n):  # what lies behind a block may be anything, or nothing
                for k in range(min(LANES, run[COUNT] - j)):
                    place = out + strides[1] * row + 4 * k
                    score_one(kind, query + strides[0] * row, here + row_bytes * k, num_steps, place)


@inlined
def weigh_rows(a: Any, begin: int, end: int, work: Any, parts: Any) -> None:
    """Second pass: scores to weights; each row's largest score and sum of weights."""
    _, positions, scores, _, _ = work
    for row in range(len(scores)):
        low, high = max(0, first_seen(a, positions[row]) - begin), min(end, positions[row] + 1) - begin
        vectors = (max(0, high) + LANES - 1) // LANES
        at = scores[row].ctypes.data
        if a.softcap:
            soft_cap(at, vectors, np.float32(a.softcap))
        for i in range(min(low, vectors * LANES)):
            scores[row, i] = -np.inf
        for i in range(max(0, high), vectors * LANES):
            scores[row, i] = -np.inf
        exponentials(at, vectors, parts[row].ctypes.data)


@inlined
def gather_rows(number_format: int, a: Any, begin: int, num_runs: int, work: Any, parts: Any, later: int) -> None:
    """Third pass: each row's outputs += weights * values; neighbouring rows together over what all of them see.

    ``later`` is the address of the keys that come after the last of these values.
    """
    queries, _, _, runs, copy = work
    row_bytes = FORMAT_BYTES[number_format] * a.H
    for i in range(num_runs):
        values = a.v_cache + row_bytes * runs[i, PLACE]
        if _are_read_in_place(number_format, a, len(queries)):
            ahead = later
            if i + 1 < num_runs:
                ahead = a.v_cache + row_bytes * runs[i + 1, PLACE]
            _gather_run(number_format, 1, a, begin, runs[i], values, ahead, work, parts)
        else:
            values = _copy_rows(number_format, a, values, runs[i, COUNT], copy)
            _gather_run(FLOAT32, 0, a, begin, runs[i], values, 0, work, parts)


@inlined
def _gather_run(
    kind: int, asks: int, a: Any, begin: int, run: Any, values: int, ahead: int, work: Any, parts: Any
) -> None:
    """The weighted values of one run; see ``_score_run``."""
    _, positions, scores, _, _ = work
    start, count, column = begin + run[COLUMN], run[COUNT], run[COLUMN]
    for first in range(0, len(scores), MAX_ROWS):
        n = min(MAX_ROWS, len(scores) - first)
        low = max(0, first_seen(a, positions[first + n - 1]) - start)
        high = max(low, min(count, positions[first] + 1 - start))
        # What some rows see and not all comes before the rest, row by row, and after it; in one loop, since each call
        # is compiled on its own.
        for i in range(-n if low > 0 else 0, n + 1 if high < count else 1):
            row, num_rows, begin_at, end_at = first, n, low, min(count, high)
            if i != 0:
                row, num_rows = first + (n + i if i < 0 else i - 1), 1
                seen = min(count, positions[row] + 1 - start)
                begin_at = max(0, first_seen(a, positions[row]) - start) if i < 0 else high
                end_at = min(low, seen) if i < 0 else seen
            if begin_at >= end_at:
                continue
            weights, out = scores[row].ctypes.data + 4 * (column + begin_at), parts[row].ctypes.data + STATE_BYTES
            strides, along = (scores.strides[0], parts.strides[0]), FORMAT_BYTES[kind] * a.width * begin_at
            source, asked, num_steps = values + along, ahead + along, a.width // LANES
            num_positions = end_at - begin_at
            gather(kind, asks, weights, strides[0], source, num_steps, num_positions, out, strides[1], num_rows, asked)
