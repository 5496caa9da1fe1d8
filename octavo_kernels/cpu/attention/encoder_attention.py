"""``encoder_attention``: a tile of a text's rows for one head, with all keys that the rows see.

The keys are turned, so that scores and outputs are both products of a few rows with a matrix whose rows are vectors:
``q k^T``, and the softmax's weights times the values. Every sum runs along the head or the text in order, and begins
at the text's first row, so that a row's bits do not depend on the other texts.

Shapes: T tokens of several texts, N heads, K kv heads, H head dim, M the largest distance that has a bias of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from torch import Tensor

from octavo.ops.attention.attention import encoder_attention
from octavo_kernels.cpu.attention.attention_dots import STATE_BYTES, WEIGH_ROWS, exponentials
from octavo_kernels.cpu.attention.attention_turned import turn
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import emitted, inlined, rarely_used, task
from octavo_kernels.cpu.memory import fields, keep, read, view, whole_lines
from octavo_kernels.cpu.tensors import address, declines_floats
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
    splat,
    store,
)

VECTOR_BYTES = 4 * LANES
ROWS = 8
"""Rows whose scores are held at once; those missing at the end of a tile count as zeros."""
ROWS_AT_ONCE = 8 if HAS_AVX512 else 2
"""With two vectors of each, sums and operands just fit the registers."""
TILE_ROWS = 128
"""Rows for which a text's keys are turned once."""
MULTIPLICATIONS_A_PIECE = 50_000

ARGUMENTS = fields(
    "task items piece q k v out tiles bias N K H width q_stride k_stride v_stride longest window most scale:float"
)
"""Strides from one token to the next in bytes; ``width`` is H rounded up to a multiple of 16; ``longest`` is an upper
bound of the keys that a tile sees, a multiple of 16."""
TILE = fields("first count start low high")
"""``count`` rows of the step from ``first`` on, which see the rows ``start + low`` to ``start + high``, where ``start``
is their text's first row and ``low`` a multiple of 16."""


@emitted()
def multiply_rows(
    b: ir.IRBuilder, rows: ir.Value, row_stride: ir.Value, num_steps: ir.Value, matrix: ir.Value,
    vector_stride: ir.Value, step_stride: ir.Value, out: ir.Value, out_stride: ir.Value, num_vectors: ir.Value,
) -> None:  # fmt: skip
    """``ROWS`` rows of ``num_steps`` numbers times a matrix of as many rows, ``num_vectors`` vectors wide.

    All but the counts are addresses and strides in bytes. A result's products are added one after the other.
    """
    pairs = b.lshr(num_vectors, i64(1))
    done = b.shl(pairs, i64(1))
    for width, first, turns in ((2, i64(0), pairs), (1, done, b.sub(num_vectors, done))):
        with Loop(b, turns, []) as loop:
            vector = b.add(first, b.mul(loop.index, i64(width)))
            columns = [b.add(matrix, b.mul(b.add(vector, i64(i)), vector_stride)) for i in range(width)]
            for row in range(0, ROWS, ROWS_AT_ONCE):
                chosen = range(row, row + ROWS_AT_ONCE)
                places = [offset(b, rows, (row_stride, i)) for i in chosen]
                outs = [offset(b, out, (out_stride, i), (vector, VECTOR_BYTES)) for i in chosen]
                _emit_products(b, places, num_steps, columns, step_stride, outs)


def _emit_products(
    b: ir.IRBuilder,
    rows: list[ir.Value],
    num_steps: ir.Value,
    columns: list[ir.Value],
    step_stride: ir.Value,
    outs: list[ir.Value],
) -> None:
    with Loop(b, num_steps, [constant(F32x16, 0.0)] * (len(rows) * len(columns))) as loop:
        along, totals = b.mul(loop.index, step_stride), iter(loop.carried)
        vectors = [load(b, F32x16, b.add(column, along)) for column in columns]
        numbers = [splat(b, load(b, F32, offset(b, row, (loop.index, 4)))) for row in rows]
        loop.carried = [fma(b, number, vector, next(totals)) for number in numbers for vector in vectors]
    results = iter(loop.results)
    for out in outs:
        for i in range(len(columns)):
            store(b, next(results), out, VECTOR_BYTES * i)


@inlined
def _copy_rows(a: Any, source: int, stride: int, count: int, factor: Any, out: Any) -> None:
    """``count`` rows of a head, H numbers each, times ``factor``, to the first rows of ``out``."""
    for row in range(count):
        numbers, to = view(source + row * stride, a.H, np.float32), out[row]
        for i in range(a.H):
            to[i] = numbers[i] * factor


@inlined
def _mask(a: Any, scores: Any, position: int, low: int, high: int, head: int) -> None:
    """The scores of the row at ``position`` with the keys ``low .. high``: biases, and -inf for those it cannot see."""
    if a.bias:
        bias = view(a.bias + 4 * head * (2 * a.most + 1), 2 * a.most + 1, np.float32)
        for i in range(high - low):
            scores[i] += bias[max(-a.most, min(a.most, low + i - position)) + a.most]
    if a.window:
        for i in range(min(high, max(low, position - a.window)) - low):
            scores[i] = -np.inf
        for i in range(max(low, min(high, position + a.window + 1)) - low, high - low):
            scores[i] = -np.inf
    for i in range(high - low, (high - low + LANES - 1) // LANES * LANES):
        scores[i] = -np.inf


@rarely_used
@task
def _attend_task(arguments: int, begin: int, end: int) -> None:
    """Task over (tile, head)."""
    a = read(arguments, ARGUMENTS)
    queries, keys, values = whole_lines(ROWS, a.width), whole_lines(LANES, a.width), whole_lines(a.longest, a.width)
    turned, scores = whole_lines(a.longest // LANES, a.width * LANES), whole_lines(ROWS, a.longest)
    states, outs = whole_lines(ROWS, STATE_BYTES // 4), whole_lines(ROWS, a.width)
    queries[:], keys[:], values[:] = 0, 0, 0
    one, steps = np.float32(1), a.width // LANES
    for item in range(begin, end):
        head, tile = item % a.N, view(a.tiles, a.items // a.N, TILE)[item // a.N]
        of_keys, count, first_key = 4 * (head // (a.N // a.K)) * a.H, tile.high - tile.low, tile.start + tile.low
        vectors = (count + LANES - 1) // LANES
        _copy_rows(a, a.v + of_keys + first_key * a.v_stride, a.v_stride, count, one, values)
        for chunk in range(vectors):
            source = a.k + of_keys + (first_key + chunk * LANES) * a.k_stride
            _copy_rows(a, source, a.k_stride, min(LANES, count - chunk * LANES), one, keys)
            turn(keys.ctypes.data, steps, turned[chunk].ctypes.data)
        for row in range(0, tile.count, ROWS):
            rows = min(ROWS, tile.count - row)
            source = a.q + 4 * head * a.H + (tile.first + row) * a.q_stride
            _copy_rows(a, source, a.q_stride, rows, np.float32(a.scale), queries)
            places, apart = (turned.ctypes.data, turned.strides[0]), (queries.strides[0], scores.strides[0])
            multiply_rows(
                queries.ctypes.data, apart[0], a.width, *places, 4 * LANES, scores.ctypes.data, apart[1], vectors
            )
            for i in range(rows):
                _mask(a, scores[i], tile.first + row + i - tile.start, tile.low, tile.high, head)
            for i in range(0, rows, WEIGH_ROWS):
                at = scores[i].ctypes.data, apart[1]
                exponentials(*at, vectors, states[i].ctypes.data, states.strides[0])
            places = values.ctypes.data, 4 * LANES
            multiply_rows(scores.ctypes.data, apart[1], count, *places, apart[0], outs.ctypes.data, apart[0], steps)
            for i in range(rows):
                out = view(a.out + 4 * ((tile.first + row + i) * a.N + head) * a.H, a.H, np.float32)
                for h in range(a.H):
                    out[h] = outs[i, h] / states[i, 1]
    keep((queries, keys, values, turned, scores, states, outs))


@functools.lru_cache(maxsize=8)
def _tiles(ends: tuple[int, ...], window: int) -> tuple[npt.NDArray[np.void], int, int]:
    """The tiles of texts, the most keys that one sees, and the products of rows and keys. All layers have the same."""
    found, start = [], 0
    for end in ends:
        for first in range(start, end, TILE_ROWS):
            last, low, high = min(end, first + TILE_ROWS), 0, end - start
            if window:
                low, high = max(0, first - start - window) // LANES * LANES, min(high, last - start + window)
            found.append((first, last - first, start, low, high))
        start = end
    tiles = np.array(found, TILE)
    counts = tiles["high"] - tiles["low"]
    return tiles, int(counts.max(initial=0)), int((counts * tiles["count"]).sum())


@encoder_attention.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def encoder_attention_numba(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    ends: Sequence[int],
    scale: float,
    window: int = 0,
    bias_NM: Tensor | None = None,
) -> Tensor:
    """See ``ops.encoder_attention``."""
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    if N % K or k_TKH.shape != v_TKH.shape or k_TKH.shape != (T, K, H) or (ends[-1] if ends else 0) != T:
        shapes = [list(x.shape) for x in (q_TNH, k_TKH, v_TKH)]
        raise ValueError(f"encoder_attention: queries, keys and values {shapes}, texts that end at {list(ends)}")
    heads = [x if x.stride()[1:] == (H, 1) else x.contiguous() for x in (q_TNH.float(), k_TKH.float(), v_TKH.float())]
    bias = None if bias_NM is None else bias_NM.float().contiguous()
    out_TNH = torch.empty(T, N, H)
    tiles, longest, work = _tiles(tuple(ends), window)
    if not T:
        return out_TNH.to(q_TNH.dtype)
    items = len(tiles) * N
    piece = max(1, items * MULTIPLICATIONS_A_PIECE // max(1, 2 * work * N * H))
    values = (
        *(_attend_task(), items, piece, *(x.data_ptr() for x in heads), out_TNH.data_ptr(), tiles.ctypes.data),
        *(address(bias), N, K, H, -(-H // LANES) * LANES, *(4 * x.stride(0) for x in heads)),
        *(-(-longest // LANES) * LANES, window, 0 if bias is None else bias.shape[1] // 2, scale),
    )
    call(task_driver(), ARGUMENTS, values)
    return out_TNH.to(q_TNH.dtype)
