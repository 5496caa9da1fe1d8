"""Attention of a tile: one kv head of one sequence, all query heads that share it, a few neighbouring tokens.

A context is taken in parts of PART positions, at multiples of it, whatever is computed beside. Over a part there
are three passes through float32 scratch memory::

    scores     for each run of keys, at most RUN in one block: every row's dot products with them
    weights    for each row: e ** (score - largest) of what it sees, and their sum
    output     for each run of values: every row's weighted sum goes on

Parts are merged in the order of their positions. No pass lets a row's arithmetic depend on which rows share its
tile, so chunks may be cut anywhere, and the parts of a single row may be computed by different threads.
Runs of a 16-bit cache, or of a head that is not whole vectors, are first copied out as float32 rows of whole vectors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from octavo.ops.cpu.attention_dots import (
    LOWEST,
    MAX_ROWS,
    STATE_BYTES,
    VECTOR_BYTES,
    exponentials,
    gather,
    merge,
    prefetch,
    score,
    soft_cap,
)
from octavo.ops.cpu.attention_rows import STEP
from octavo.ops.cpu.compiled import compiled_task, inlined
from octavo.ops.cpu.half import widen
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.vector_ir import FLOAT32, FORMAT_BYTES, LANES

PART = 128
RUN = 64
"""Most positions at a time: their float32 keys stay in the first-level cache at usual head sizes."""
TILE_ROWS = 24
"""Rows of a tile, at least the query heads of one token."""
STATE = STATE_BYTES // 4

TILE = fields(sequence=int, row=int, num_tokens=int, start=int, first_part=int, last_part=int, slot=int, num_slots=int)
"""``num_tokens`` rows of q from ``row``, the first of which sits at position ``start`` of its sequence.

A tile computes parts ``first_part`` to before ``last_part``. With a ``slot`` from 0 on it is one part of a single row
and leaves it there; the first of its tiles has the number of slots, the others 0.
"""


@inlined
def first_seen(a: Any, position: int) -> Any:
    """The first position that a row at ``position`` sees."""
    return max(0, position - a.window + 1) if a.window else 0


@inlined
def _run_length(begin: int, end: int, block_size: int) -> Any:
    """Positions from ``begin`` on that are in one block and not more than a run."""
    return min(end - begin, block_size - begin % block_size, RUN)


@inlined
def _place(a: Any, head: int, table: Any, position: int) -> Any:
    """Which row of a cache holds a position."""
    return (table[position // a.block_size] * a.K + head) * a.block_size + position % a.block_size


@inlined
def _rows_at(number_format: int, a: Any, cache: int, first: int, count: int, copy: Any) -> Any:
    """Address of ``count`` float32 rows of a cache from its row ``first`` on, in ``copy`` if need be."""
    item = FORMAT_BYTES[number_format]
    at = cache + item * first * a.H
    if a.width == a.H:
        if number_format == FLOAT32:
            return at
        widen(number_format, at, copy.ctypes.data, count * a.H)
    else:
        for j in range(count):
            widen(number_format, at + item * j * a.H, copy[j].ctypes.data, a.H)
    return copy.ctypes.data


@inlined
def _ask_for(number_format: int, a: Any, cache: int, first: int, count: int) -> None:
    """Have rows of a cache brought near while something else is computed."""
    row_bytes = a.H * FORMAT_BYTES[number_format]
    prefetch(cache + first * row_bytes, count * row_bytes // VECTOR_BYTES)


@inlined
def _score_rows(number_format: int, a: Any, tile: Any, head: int, begin: int, end: int, work: Any) -> None:
    """First pass: scores of positions ``begin .. end``: for each row those that it sees, and some that mean nothing."""
    queries, scores, copy = work
    table, group = view(a.tables + 4 * tile.sequence * a.table_width, a.table_width, np.int32), a.N // a.K
    run = begin
    while run < end:
        count = _run_length(run, end, a.block_size)
        first = _place(a, head, table, run)
        keys = _rows_at(number_format, a, a.k_cache, first, count, copy)
        _ask_for(number_format, a, a.v_cache, first, count)
        in_block = a.block_size - run % a.block_size
        for row in range(len(queries)):
            position = tile.start + row // group
            visible = min(count, position + 1 - run)
            query, out = queries[row].ctypes.data, scores[row].ctypes.data + 4 * (run - begin)
            j = max(0, first_seen(a, position) - run) // LANES * LANES
            while j < visible:
                n = LANES if j + LANES <= in_block else 1
                score(query, keys + 4 * a.width * j, a.width // LANES, out + 4 * j, n)
                j += n
        run += count


@inlined
def _weigh_rows(a: Any, tile: Any, begin: int, end: int, work: Any, parts: Any) -> None:
    """Second pass: scores to weights; each row's largest score and sum of weights."""
    _, scores, _ = work
    group = a.N // a.K
    for row in range(len(scores)):
        position = tile.start + row // group
        low, high = max(0, first_seen(a, position) - begin), min(end, position + 1) - begin
        vectors = (max(0, high) + LANES - 1) // LANES
        at = scores[row].ctypes.data
        if a.softcap:
            soft_cap(at, vectors, np.float32(a.softcap))
        scores[row, : min(low, vectors * LANES)] = -np.inf
        scores[row, max(0, high) : vectors * LANES] = -np.inf
        exponentials(at, vectors, parts[row].ctypes.data)


@inlined
def _gather_rows(number_format: int, a: Any, tile: Any, head: int, begin: int, end: int, work: Any, parts: Any) -> None:
    """Third pass: each row's outputs += weights * values; neighbouring rows together over what all of them see."""
    _, scores, copy = work
    table, group = view(a.tables + 4 * tile.sequence * a.table_width, a.table_width, np.int32), a.N // a.K
    num_rows, run = len(scores), begin
    while run < end:
        count = _run_length(run, end, a.block_size)
        values = _rows_at(number_format, a, a.v_cache, _place(a, head, table, run), count, copy)
        if run + count < end:
            ahead = _run_length(run + count, end, a.block_size)
            _ask_for(number_format, a, a.k_cache, _place(a, head, table, run + count), ahead)
        elif head + 1 < a.K:
            _ask_for(
                number_format, a, a.k_cache, _place(a, head + 1, table, begin), _run_length(begin, end, a.block_size)
            )
        for first in range(0, num_rows, MAX_ROWS):
            n = min(MAX_ROWS, num_rows - first)
            nearest, farthest = tile.start + first // group, tile.start + (first + n - 1) // group
            shared = max(0, first_seen(a, farthest) - run)
            later = max(shared, min(count, nearest + 1 - run))
            for row in range(first, first + n):
                position = tile.start + row // group
                low, high = max(0, first_seen(a, position) - run), min(shared, count, position + 1 - run)
                _gather(a, scores, parts, values, row, 1, run - begin, low, high)
            _gather(a, scores, parts, values, first, n, run - begin, shared, min(count, later))
            for row in range(first, first + n):
                high = min(count, tile.start + row // group + 1 - run)
                _gather(a, scores, parts, values, row, 1, run - begin, later, high)
        run += count


@inlined
def _gather(
    a: Any, scores: Any, parts: Any, values: int, row: int, num_rows: int, column: int, low: int, high: int
) -> None:
    if high > low:
        weights, out = scores[row].ctypes.data + 4 * (column + low), parts[row].ctypes.data + STATE_BYTES
        strides = 4 * scores.shape[1], 4 * parts.shape[1]
        gather(weights, strides[0], values + 4 * a.width * low, a.width // LANES, high - low, out, strides[1], num_rows)


@functools.cache
def attend_task(number_format: int) -> int:
    """Task over (tile, kv head), the last tiles first: they see the most positions."""

    def attend(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, STEP)
        group, most = a.N // a.K, max(a.N // a.K, TILE_ROWS)
        queries, copy = np.empty((most, a.width), np.float32), np.zeros((RUN, a.width), np.float32)
        scores = np.empty((most, PART + LANES), np.float32)
        totals, parts = np.empty((most, STATE + a.width), np.float32), np.empty((most, STATE + a.width), np.float32)
        for item in range(begin, end):
            tile = view(a.tiles, a.num_tiles, TILE)[a.num_tiles - 1 - item // a.K]
            head, num_rows = item % a.K, tile.num_tokens * group
            source = view(a.q, a.T * a.N * a.width, np.float32)
            for row in range(num_rows):
                at = ((tile.row + row // group) * a.N + head * group + row % group) * a.width
                queries[row] = source[at : at + a.width]
            totals[:num_rows] = 0
            totals[:num_rows, 0] = LOWEST
            work = queries[:num_rows], scores[:num_rows], copy
            for part in range(tile.first_part, tile.last_part):
                parts[:num_rows] = 0
                low = max(part * PART, first_seen(a, tile.start) // LANES * LANES)
                high = min((part + 1) * PART, tile.start + tile.num_tokens)
                _score_rows(number_format, a, tile, head, low, high, work)
                _weigh_rows(a, tile, low, high, work, parts)
                _gather_rows(number_format, a, tile, head, low, high, work, parts)
                if tile.slot < 0:
                    for row in range(num_rows):
                        merge(totals[row].ctypes.data, parts[row].ctypes.data, a.width // LANES)
            for row in range(num_rows):
                if tile.slot < 0:
                    _finish(a, tile.row + row // group, head * group + row % group, totals[row])
                else:
                    _slot(a, tile.slot, head * group + row)[:] = parts[row]
        keep((queries, scores, totals, parts, copy))

    return compiled_task(attend)


@inlined
def _slot(a: Any, slot: int, head: int) -> Any:
    """Room for one part of one head of a single row."""
    return view(a.parts + 4 * (slot * a.N + head) * (STATE + a.width), STATE + a.width, np.float32)


@inlined
def _finish(a: Any, t: int, head: int, total: Any) -> None:
    """Outputs over sum of weights, with the sink among them if there is one."""
    if a.sinks:
        sink = np.zeros(STATE + a.width, np.float32)
        sink[0], sink[1] = view(a.sinks, a.N, np.float32)[head], 1
        merge(total.ctypes.data, sink.ctypes.data, a.width // LANES)
        keep(sink)
    out = view(a.out + 4 * (t * a.N + head) * a.H, a.H, np.float32)
    for i in range(a.H):
        out[i] = total[STATE + i] / total[1]


@functools.cache
def merge_task() -> int:
    """Task over tiles: the first of a single row's tiles puts its parts together."""

    def merge_parts(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, STEP)
        total = np.empty(STATE + a.width, np.float32)
        for item in range(begin, end):
            tile = view(a.tiles, a.num_tiles, TILE)[item]
            if tile.num_slots > 0:
                for head in range(a.N):
                    total[:] = 0
                    total[0] = LOWEST
                    for slot in range(tile.slot, tile.slot + tile.num_slots):
                        merge(total.ctypes.data, _slot(a, slot, head).ctypes.data, a.width // LANES)
                    _finish(a, tile.row, head, total)
        keep(total)

    return compiled_task(merge_parts)
