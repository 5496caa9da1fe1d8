"""Scores of many rows: queries and keys are transposed first, so that a lane is a key and no sum runs across lanes.

A *turned* chunk is sixteen rows transposed, float32 [width, 16]. The order of a score's additions is that of ``score``
in ``attention_dots``: sixteen partial sums along the head, then those 8, 4, 2 and 1 apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from octavo_kernels.cpu.compiled import emitted
from octavo_kernels.cpu.vector_ir import (
    F32,
    HAS_AVX512,
    LANES,
    F32x16,
    Loop,
    constant,
    fma,
    i64,
    load,
    offset,
    shuffle,
    splat,
    store,
)

VECTOR_BYTES = 4 * LANES
CHUNK_ROWS = 4
"""Queries per call of ``score_turned``."""
ROWS_AT_ONCE, PLACES_AT_ONCE = (4, 4) if HAS_AVX512 else (2, 2)
"""Queries, and partial sums of each, that are computed at once: all just fit the registers."""


@emitted()
def turn(b: ir.IRBuilder, rows: ir.Value, num_steps: ir.Value, out: ir.Value) -> None:
    """Transpose sixteen contiguous float32 rows of ``num_steps`` vectors into a chunk at ``out``."""
    with Loop(b, num_steps, []) as loop:
        at, to = offset(b, rows, (loop.index, VECTOR_BYTES)), offset(b, out, (loop.index, LANES * VECTOR_BYTES))
        vectors = [load(b, F32x16, offset(b, at, (num_steps, VECTOR_BYTES * i))) for i in range(LANES)]
        for i, vector in enumerate(turned(b, vectors)):
            store(b, vector, to, VECTOR_BYTES * i)


def turned(b: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Swap the halves of each pair of vectors that lie 8 apart, the quarters of those 4 apart, and so on."""
    for distance in (8, 4, 2, 1):
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & distance:
                x, y = vectors[i], vectors[i + distance]
                vectors[i], vectors[i + distance] = shuffle(b, x, y, low), shuffle(b, x, y, high)
    return vectors


@emitted()
def score_turned(
    b: ir.IRBuilder, queries: ir.Value, keys: ir.Value, num_steps: ir.Value, out: ir.Value, out_stride: ir.Value,
    room: ir.Value,
) -> None:  # fmt: skip
    """Dot products of CHUNK_ROWS columns of a chunk, from ``queries`` on, with the 16 of a chunk of keys.

    ``room`` is scratch for CHUNK_ROWS vectors: without it, the compiler would spill the operands of sums that are
    combined only at the end.
    """
    outs = [offset(b, out, (out_stride, row)) for row in range(CHUNK_ROWS)]
    odd = [b.add(room, i64(VECTOR_BYTES * row)) for row in range(CHUNK_ROWS)]
    for first, places in ((0, outs), (1, odd)):
        for place, total in zip(places, _quarter(b, queries, keys, num_steps, first), strict=True):
            store(b, total, place)
        for place, total in zip(places, _quarter(b, queries, keys, num_steps, first + 2), strict=True):
            store(b, b.fadd(load(b, F32x16, place), total), place)
    for place, more in zip(outs, odd, strict=True):
        store(b, b.fadd(load(b, F32x16, place), load(b, F32x16, more)), place)


def _quarter(b: ir.IRBuilder, queries: ir.Value, keys: ir.Value, num_steps: ir.Value, first: int) -> list[ir.Value]:
    """For each query, the sum of the four partial sums from ``first`` on, 4 apart."""
    places = first, first + 8, first + 4, first + 12
    sums: dict[tuple[int, int], ir.Value] = {}
    for row in range(0, CHUNK_ROWS, ROWS_AT_ONCE):
        for place in range(0, len(places), PLACES_AT_ONCE):
            own = range(row, row + ROWS_AT_ONCE), places[place : place + PLACES_AT_ONCE]
            sums |= _partial_sums(b, queries, keys, num_steps, *own)
    pairs = [[b.fadd(sums[row, i], sums[row, i + 8]) for i in (first, first + 4)] for row in range(CHUNK_ROWS)]
    return [b.fadd(*pair) for pair in pairs]


def _partial_sums(
    b: ir.IRBuilder, queries: ir.Value, keys: ir.Value, num_steps: ir.Value, rows: Sequence[int], places: Sequence[int]
) -> dict[tuple[int, int], ir.Value]:
    """Of these queries and these of the sixteen places along a vector of the head."""
    with Loop(b, num_steps, [constant(F32x16, 0.0)] * (len(rows) * len(places))) as loop:
        totals = iter(loop.carried)
        query, key = (offset(b, x, (loop.index, LANES * VECTOR_BYTES)) for x in (queries, keys))
        sums = []
        for place in places:
            k = load(b, F32x16, key, VECTOR_BYTES * place)
            for row in rows:
                q = splat(b, load(b, F32, query, VECTOR_BYTES * place + 4 * row))
                sums.append(fma(b, q, k, next(totals)))
        loop.carried = sums
    return dict(zip(((row, place) for place in places for row in rows), loop.results, strict=True))
