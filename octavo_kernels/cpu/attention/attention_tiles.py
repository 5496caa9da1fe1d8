"""Attention of a tile: one kv head of one sequence, all query heads that share it, a few neighbouring tokens.

A context is processed in parts of PART positions, at multiples of PART, independent of other work in the step. Over a
part there are three passes through float32 scratch memory::

    scores     for each run of keys, at most RUN in one block: every row's dot products with them
    weights    for each row: e ** (score - largest) of the positions it sees, and their sum
    output     for each run of values: added to every row's weighted sum

Parts are merged in the order of their positions. In no pass does a row's arithmetic depend on the other rows of its
tile, so prompts may be chunked anywhere, and the parts of a single row may be computed by different threads.
For many rows, and for head sizes that are not a multiple of 16, keys and values are first copied as float32, and
scores are computed from transposed chunks: see ``attention_turned``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from octavo_kernels.cpu.attention.attention_dots import LOWEST, STATE_BYTES, merge
from octavo_kernels.cpu.attention.attention_passes import (
    PART,
    RUN,
    are_read_in_place,
    first_seen,
    gather_rows,
    list_runs,
    num_seen,
    score_rows,
    weigh_rows,
)
from octavo_kernels.cpu.attention.attention_rows import STEP
from octavo_kernels.cpu.attention.attention_turned import turn
from octavo_kernels.cpu.attention.cached_rows import rotate, row_bytes
from octavo_kernels.cpu.compiled import Constant, compiled_task, inlined
from octavo_kernels.cpu.memory import atomic_add, fields, keep, read, view, whole_lines
from octavo_kernels.cpu.vector_ir import LANES

TILE_ROWS = 48
"""Rows of a tile, at least the query heads of one token."""
STATE = STATE_BYTES // 4

TILE = fields("sequence row num_tokens start first_part last_part slot first_slot num_slots")
"""``num_tokens`` rows of q from ``row``, the first of which is at position ``start`` of its sequence.

A tile computes parts ``first_part`` up to, not including, ``last_part``. With a non-negative ``slot`` it is one part of
a single row and is stored in that slot, one of the ``num_slots`` of this row from ``first_slot`` on. Whoever stores the
last of them merges all.
"""


@inlined
def _tile_of(a: Any, item: int) -> Any:
    """The tile of an item of ``attend_task``: the last, the first, the last but one and so on.

    Later tiles of a prompt see more positions. So any range of items has about the same work.
    """
    nth = item // a.K
    return view(a.tiles, a.num_tiles, TILE)[nth // 2 if nth % 2 else a.num_tiles - 1 - nth // 2]


@inlined
def _table_of(a: Any, tile: Any) -> Any:
    return view(a.tables + 4 * tile.sequence * a.table_width, a.table_width, np.int32)


@inlined
def _first_of(a: Any, tile: Any, part: int) -> Any:
    """The first position of a part that a tile reads."""
    return max(part * PART, first_seen(a, tile.start) // LANES * LANES)


@inlined
def _keys_after(number_format: Constant, a: Any, item: int, part: int, last_item: int) -> Any:
    """Address of the keys that are read after a part of an item, if any."""
    tile, next_part = _tile_of(a, item), part + 1
    if next_part == tile.last_part:
        item = min(item + 1, last_item)
        tile = _tile_of(a, item)
        next_part = tile.first_part
    position = _first_of(a, tile, next_part)
    block = _table_of(a, tile)[position // a.block_size]
    place = (block * a.K + item % a.K) * a.block_size + position % a.block_size
    return a.k_cache + row_bytes(number_format, a.H) * place


@inlined
def _copy(source: Any, out: Any) -> None:
    for i in range(len(out)):  # numba takes much longer to compile an assignment of slices
        out[i] = source[i]


@inlined
def _begin(total: Any) -> None:
    """Initialise a row of STATE and outputs."""
    total[0] = LOWEST
    for i in range(1, len(total)):
        total[i] = 0


@functools.cache
def attend_task(number_format: int) -> int:
    """Task over (tile, kv head)."""

    def attend(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, STEP)
        group, rows = a.N // a.K, 0
        for item in range(begin, end):
            rows = max(rows, _tile_of(a, item).num_tokens * group)
        chunks, room = (rows + LANES - 1) // LANES, 0 if are_read_in_place(a, rows) else RUN + LANES
        most = chunks * LANES
        queries, copy = whole_lines(most, a.width), whole_lines(room, a.width)
        if a.width != a.H:
            copy[:] = 0  # behind each row's numbers
        turned, scores = whole_lines(chunks + 2, a.width * LANES), whole_lines(most, PART + LANES)
        totals, parts = whole_lines(most, STATE + a.width), whole_lines(most, STATE + a.width)
        positions = np.empty(most, np.int64)
        runs, source = np.empty((PART + 1, 4), np.int64), view(a.q, a.T * a.N * a.width, np.float32)
        for item in range(begin, end):
            tile, head = _tile_of(a, item), item % a.K
            table, num_rows = _table_of(a, tile), tile.num_tokens * group
            most_seen = num_seen(a, tile.start + tile.num_tokens - 1)
            for row in range(num_rows):
                at = ((tile.row + row // group) * a.N + head * group + row % group) * a.width
                _copy(source[at : at + a.width], queries[row])
                positions[row] = num_seen(a, tile.start + row // group) - 1
                _begin(totals[row])
            work = queries[:num_rows], positions, scores, runs, turned, copy
            if not are_read_in_place(a, num_rows):
                for chunk in range((num_rows + LANES - 1) // LANES):
                    turn(queries[chunk * LANES].ctypes.data, a.width // LANES, turned[chunk].ctypes.data)
            for part in range(tile.first_part, tile.last_part):
                for row in range(num_rows):
                    _begin(parts[row])
                low, high = _first_of(a, tile, part), min((part + 1) * PART, most_seen)
                num_runs = list_runs(a, table, head, low, high, runs)
                score_rows(number_format, a, low, num_runs, work)
                weigh_rows(a, low, high, head, tile.row, work, parts)
                later = _keys_after(number_format, a, item, part, end - 1)
                gather_rows(number_format, a, low, num_runs, work, parts, later)
                if tile.slot < 0:
                    for row in range(num_rows):
                        merge(totals[row].ctypes.data, parts[row].ctypes.data, a.width // LANES)
            for row in range(num_rows):
                if tile.slot < 0:
                    _finish(number_format, a, tile.row + row // group, head * group + row % group, totals[row])
                else:
                    _copy(parts[row], _slot(a, tile.slot, head * group + row))
            if tile.slot >= 0 and atomic_add(a.counts + 8 * (tile.first_slot * a.K + head), 1) == tile.num_slots - 1:
                for row in range(group):
                    _merge_slots(number_format, a, tile, head * group + row, totals[row])
        keep((queries, positions, scores, totals, parts, runs, turned, copy))

    return compiled_task(attend)


@inlined
def _slot(a: Any, slot: int, head: int) -> Any:
    """Memory for one part of one head of a single row."""
    return view(a.parts + 4 * (slot * a.N + head) * (STATE + a.width), STATE + a.width, np.float32)


@inlined
def _merge_slots(number_format: int, a: Any, tile: Any, head: int, total: Any) -> None:
    """Merge the parts of one head of a single row, in the order of their positions."""
    _begin(total)
    for slot in range(tile.first_slot, tile.first_slot + tile.num_slots):
        merge(total.ctypes.data, _slot(a, slot, head).ctypes.data, a.width // LANES)
    _finish(number_format, a, tile.row, head, total)


@inlined
def _finish(number_format: int, a: Any, t: int, head: int, total: Any) -> None:
    """Divide outputs by the sum of weights, which includes the sink if there is one; it is 0 where nothing is seen."""
    if a.sinks:
        sink = np.zeros(STATE + a.width, np.float32)
        sink[0], sink[1] = view(a.sinks + 4 * t * a.sinks_stride, a.N, np.float32)[head], 1
        merge(total.ctypes.data, sink.ctypes.data, a.width // LANES)
        keep(sink)
    rotate(number_format, total[STATE:])
    out = view(a.out + 4 * (t * a.N + head) * a.out_width, a.out_width, np.float32)
    if a.out_width > a.H:
        out[a.H] = total[0] + np.log(total[1])
    scale = np.float32(a.factor)
    if a.v_scales:
        scale *= view(a.v_scales, a.K, np.float32)[head // (a.N // a.K)]
    if total[1] == 0:
        scale = np.float32(0)
        total[1] = 1
    for i in range(a.H):
        out[i] = total[STATE + i] / total[1] * scale
