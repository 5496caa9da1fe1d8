"""The three passes of attention over one part of a context: see ``attention_tiles``.

Working set: ``queries`` float32 [rows, width] at ``positions`` int64 [rows], of neighbouring tokens in order, all of
one kv head; their ``scores`` float32 [rows plus padding, PART + 16] over the part; its ``runs`` from ``list_runs``;
the transposed queries ``turned``, float32 [chunks, width, 16] plus a chunk for keys; and scratch for float32 rows,
``copy`` [RUN + 16, width]. ``turned`` and ``copy`` are used for keys and values that are not read in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo_kernels.cpu.attention.attention_dots import (
    MAX_ROWS,
    SCORE_ROWS,
    STATE_BYTES,
    WEIGH_ROWS,
    exponentials,
    gather,
    score,
    score_one,
    soft_cap,
)
from octavo_kernels.cpu.attention.attention_turned import CHUNK_ROWS, score_turned, turn
from octavo_kernels.cpu.attention.cached_rows import row_bytes, unpack
from octavo_kernels.cpu.compiled import Constant, copied, inlined
from octavo_kernels.cpu.memory import view
from octavo_kernels.cpu.vector_ir import FLOAT32, LANES

PART = 128
RUN = 64
"""Most positions at a time: their float32 keys stay in the first-level cache at usual head sizes."""
IN_PLACE_ROWS = 8
"""Most rows of a tile for which converting 16-bit numbers on each use is faster than a copy."""
COLUMN, COUNT, PLACE, ROOM = range(4)
"""Fields of a run: its offset in the part; its number of positions; the cache row of the first position; the number of
rows from there to the end of the block."""


@inlined
def first_seen(a: Any, position: int) -> Any:
    """The first position that a row at ``position`` sees."""
    return max(0, position - a.window + 1) if a.window else 0


@inlined
def num_seen(a: Any, position: int) -> Any:
    """How many positions of the caches are not behind ``position``, which is -1 at least."""
    return (position - a.part + a.num_parts) // a.num_parts


@inlined
def list_runs(a: Any, table: Any, head: int, begin: int, end: int, runs: Any) -> Any:
    """Split positions ``begin .. end`` into runs within blocks; ``runs`` int64 [PART + 1, 4]; returns their number."""
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
def are_read_in_place(a: Any, num_rows: int) -> bool:
    """Whether cached rows are read in place: for a few rows, that takes no longer than copying and transposing."""
    return a.width == a.H and num_rows <= IN_PLACE_ROWS


@inlined
def _copy_runs(number_format: Constant, a: Any, cache: int, first: int, num_runs: int, runs: Any, copy: Any) -> Any:
    """Copy runs from ``first`` on to ``copy`` as padded float32 rows; returns the numbers of runs and rows."""
    one_row, n, count = row_bytes(number_format, a.H), 0, 0
    while first + n < num_runs and count + runs[first + n, COUNT] <= RUN:
        rows, more = cache + one_row * runs[first + n, PLACE], runs[first + n, COUNT]
        unpack(number_format, rows, a.H, more, copy[count].ctypes.data, a.width // LANES)
        n, count = n + 1, count + more
    return n, count


@copied
def score_rows(number_format: int, a: Any, begin: int, num_runs: int, work: Any) -> None:
    """First pass over the part from ``begin`` on: each row's scores of the positions it sees; others are undefined."""
    queries, _, _, runs, _, copy = work
    one_row = row_bytes(number_format, a.H)
    if not are_read_in_place(a, len(queries)):
        i = 0
        while i < num_runs:
            n, count = _copy_runs(number_format, a, a.k_cache, i, num_runs, runs, copy)
            _score_copy(a, begin, runs[i, COLUMN], count, work)
            i += n
        return
    for i in range(num_runs):
        keys, ahead = a.k_cache + one_row * runs[i, PLACE], a.v_cache + one_row * runs[0, PLACE]
        if i + 1 < num_runs:
            ahead = a.k_cache + one_row * runs[i + 1, PLACE]
        _score_run(number_format, a, begin, runs[i], keys, ahead, work)


@inlined
def _score_copy(a: Any, begin: int, column: int, count: int, work: Any) -> None:
    """Scores of ``count`` keys in ``copy``, transposed sixteen at a time. Lanes behind the last key are undefined."""
    queries, positions, scores, _, turned, copy = work
    num_steps, keys, room = a.width // LANES, turned[len(turned) - 2].ctypes.data, turned[len(turned) - 1].ctypes.data
    for j in range(0, count, LANES):
        turn(copy[j].ctypes.data, num_steps, keys)
        start = begin + column + j
        for first in range(0, len(queries), CHUNK_ROWS):
            last = min(first + CHUNK_ROWS, len(queries)) - 1
            if start <= positions[last] and start + LANES > first_seen(a, positions[first]):
                query, out = turned[first // LANES].ctypes.data + 4 * (first % LANES), scores[first].ctypes.data
                score_turned(query, keys, num_steps, out + 4 * (column + j), scores.strides[0], room)


@inlined
def _score_run(kind: Constant, a: Any, begin: int, run: Any, keys: int, ahead: int, work: Any) -> None:
    """Scores of one run's keys, of format ``kind``; as many bytes are prefetched from ``ahead`` on."""
    queries, positions, scores, _, _, _ = work
    one_row, num_steps, strides = row_bytes(kind, a.width), a.width // LANES, (queries.strides[0], scores.strides[0])
    for j in range(0, run[COUNT], LANES):
        start, here, asked = begin + run[COLUMN] + j, keys + one_row * j, ahead + one_row * j
        for first in range(0, len(queries), SCORE_ROWS):
            n = min(SCORE_ROWS, len(queries) - first)
            if start > positions[first + n - 1] or start + LANES <= first_seen(a, positions[first]):
                continue
            query, out = queries[first].ctypes.data, scores[first].ctypes.data + 4 * (run[COLUMN] + j)
            if j + LANES <= run[ROOM]:
                score(kind, 1, query, strides[0], n, here, num_steps, out, strides[1], asked)
                continue
            for row in range(n):  # memory behind a block may be unrelated or unmapped
                for k in range(min(LANES, run[COUNT] - j)):
                    place = out + strides[1] * row + 4 * k
                    score_one(kind, query + strides[0] * row, here + one_row * k, num_steps, place)


@copied
def weigh_rows(a: Any, begin: int, end: int, head: int, token: int, work: Any, parts: Any) -> None:
    """Second pass: scores to weights; each row's largest score and sum of weights. ``head`` is their kv head, ``token``
    the step's row that is the first of them."""
    queries, positions, scores, _, _, _ = work
    num_rows, group = len(queries), a.N // a.K
    for first in range(0, num_rows, WEIGH_ROWS):
        last = min(first + WEIGH_ROWS, num_rows) - 1
        vectors = (min(end, positions[last] + 1) - begin + LANES - 1) // LANES
        for row in range(first, last + 1):
            low, high = max(0, first_seen(a, positions[row]) - begin), min(end, positions[row] + 1) - begin
            if a.softcap:
                soft_cap(scores[row].ctypes.data, vectors, np.float32(a.softcap))
            if a.slopes:
                slope = view(a.slopes, a.N, np.float32)[head * group + row % group]
                for i in range(low, high):
                    scores[row, i] -= slope * np.float32(positions[row] - begin - i)
            if a.bias:
                at = a.bias + 4 * ((token + row // group) * a.N + head * group + row % group) * a.extent
                bias = view(at, a.extent, np.float32)
                for i in range(max(low, positions[row] - begin - a.extent + 1), high):
                    scores[row, i] += bias[positions[row] - begin - i]
            for i in range(min(low, vectors * LANES)):
                scores[row, i] = -np.inf
            for i in range(max(0, high), vectors * LANES):
                scores[row, i] = -np.inf
        at, state = scores[first].ctypes.data, parts[first].ctypes.data
        exponentials(at, scores.strides[0], max(0, vectors), state, parts.strides[0])


@copied
def gather_rows(number_format: int, a: Any, begin: int, num_runs: int, work: Any, parts: Any, later: int) -> None:
    """Third pass: each row's outputs += weights * values; neighbouring rows together over positions that all see.

    ``later`` is the address of the keys that are read after the last of these values.
    """
    queries, _, _, runs, _, copy = work
    one_row = row_bytes(number_format, a.H)
    if not are_read_in_place(a, len(queries)):
        i = 0
        while i < num_runs:
            n, count = _copy_runs(number_format, a, a.v_cache, i, num_runs, runs, copy)
            _gather_run(FLOAT32, 0, a, begin, runs[i, COLUMN], count, copy.ctypes.data, 0, work, parts)
            i += n
        return
    for i in range(num_runs):
        values, ahead = a.v_cache + one_row * runs[i, PLACE], later
        if i + 1 < num_runs:
            ahead = a.v_cache + one_row * runs[i + 1, PLACE]
        _gather_run(number_format, 1, a, begin, runs[i, COLUMN], runs[i, COUNT], values, ahead, work, parts)


@inlined
def _gather_run(
    kind: Constant,
    asks: Constant,
    a: Any,
    begin: int,
    column: int,
    count: int,
    values: int,
    ahead: int,
    work: Any,
    parts: Any,
) -> None:
    """The weighted values of ``count`` positions; if ``asks``, as many bytes are prefetched from ``ahead`` on."""
    queries, positions, scores, _, _, _ = work
    start = begin + column
    for first in range(0, len(queries), MAX_ROWS):
        n = min(MAX_ROWS, len(queries) - first)
        low = max(0, first_seen(a, positions[first + n - 1]) - start)
        high = max(low, min(count, positions[first] + 1 - start))
        # Positions that only some rows see come before and after the common ones, row by row; in one loop, since each
        # call site is compiled separately.
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
            strides, along = (scores.strides[0], parts.strides[0]), row_bytes(kind, a.width) * begin_at
            source, asked, num_steps = values + along, ahead + along, a.width // LANES
            num_positions = end_at - begin_at
            gather(kind, asks, weights, strides[0], source, num_steps, num_positions, out, strides[1], num_rows, asked)
