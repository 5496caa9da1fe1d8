"""``block_linear``: quantises activations to int8, then multiplies panels of 16 outputs, divided among threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.linear.block_linear import PANEL, PackedBlocks, block_linear
from octavo.ops.linear.linear import PLAIN, Fused, check_linear, compose
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import Constant, compiled_task, driver, inlined, task
from octavo_kernels.cpu.linear.block_dot import (
    ONE_PANEL,
    PAIR,
    PAIR_IN_TILES,
    add_large_parts,
    block_dot,
    pair_bytes,
    pair_from,
    take_apart,
    tile_bytes,
    tokens_at_once,
)
from octavo_kernels.cpu.linear.block_scales import format_of, scale_bytes
from octavo_kernels.cpu.linear.epilogue import EPILOGUE, GATES, TILE_BYTES, finish
from octavo_kernels.cpu.linear.quantize import PART_WORDS, TOKENS_TOGETHER, quantize_row, room_for_parts, term_bytes
from octavo_kernels.cpu.linear.tile_dot import give_tiles, take_tiles
from octavo_kernels.cpu.memory import fields, keep, read, view, whole_lines
from octavo_kernels.cpu.rows.norms import normalise_row
from octavo_kernels.cpu.tensors import address, declines_activations
from octavo_kernels.cpu.threads import run, width
from octavo_kernels.cpu.vector_ir import AHEAD

TOKENS_AT_ONCE = 258
"""Rows of activations that stay in the second-level cache while all panels are multiplied with them."""
LEAST_TOKENS = 48
"""Fewest rows for which a product of few panels is divided by rows too: unpacking a pair costs as much as a few."""
WORK_A_PIECE = 200_000
"""Multiplications, and as many for unpacking as for one row: almost a microsecond, less is not worth another thread."""
ITEMS_A_THREAD = 6
NUMBERS_A_PIECE = 2048
ROWS_TO_FINISH = 8

ARGUMENTS = fields(
    EPILOGUE,
    "prepare multiply x norm eps:float order values scales zero_point has_minima group joined G pair_from "
    "terms parts counts is_pair columns rows",
)
"""Groups are those of activations, of ``joined`` groups of the weight each. The last six are set by the driver: terms
[T, G], large parts [T, ``room_for_parts``], and their counts int32 [T]; whether panels are unpacked in pairs; and the
form of the items of ``multiply``: ``rows`` rows of activations times one of ``columns`` columns of panels.
"""


@inlined
def _first_term(a: Any, t: int) -> Any:
    """Byte offset of the terms of row t."""
    together, within = t // TOKENS_TOGETHER, t % TOKENS_TOGETHER
    return (together * a.G * TOKENS_TOGETHER + within) * term_bytes(a.group, a.joined)


@inlined
def _part_bytes(a: Any) -> Any:
    """Bytes of a row's large parts."""
    return 4 * PART_WORDS * room_for_parts(a.G)


@task
def _prepare_task(arguments: int, begin: int, end: int) -> None:
    """Task over the rows that are interleaved: normalise, put in the order of the weight's columns, quantise."""
    a = read(arguments, ARGUMENTS)
    K = a.G * a.group
    counts = view(a.counts, a.T, np.int32)
    normed, scales, rest = whole_lines(1, K), np.empty(2 * a.G, np.float32), whole_lines(2, a.group)
    ordered, order = whole_lines(1, K * (a.order != 0)), view(a.order, K * (a.order != 0), np.int32)
    for t in range(begin * TOKENS_TOGETHER, min(a.T, end * TOKENS_TOGETHER)):
        x = a.x + 4 * K * t
        if a.norm:
            normalise_row(x, a.norm, normed.ctypes.data, K, K, a.eps)
            x = normed.ctypes.data
        if a.order:
            given = view(x, K, np.float32)
            for k in range(K):
                ordered[0, k] = given[order[k]]
            x = ordered.ctypes.data
        places = x, a.terms + _first_term(a, t), a.parts + t * _part_bytes(a)
        room = scales.ctypes.data, rest.ctypes.data
        counts[t] = quantize_row(a.group, a.joined, a.has_minima, *places, a.zero_point, a.G, *room)
    keep((normed, scales, rest, ordered))


@inlined
def _panels_of(a: Any, item: int) -> Any:
    """The panels of an item of ``multiply``: gates and their ups, a single one twice, or neighbours likewise."""
    panels, column = (a.N + PANEL - 1) // PANEL, item % a.columns
    if a.gate:
        return column, column + panels // 2
    if not a.is_pair:
        return column, column
    return 2 * column, min(2 * column + 1, panels - 1)


@inlined
def _panel_at(a: Any, panel: int, value_bytes: int, scale_bytes: int) -> Any:
    """Addresses of a panel's values and scales."""
    return a.values + panel * a.G * value_bytes, a.scales + panel * a.G * scale_bytes


@inlined
def _sum_up(
    operand: Constant,
    bits: Constant,
    group: Constant,
    has_minima: Constant,
    scale_format: Constant,
    a: Any,
    first: int,
    count: int,
    weights: Any,
    ahead: Any,
    out: int,
    stride: int,
) -> None:
    """Products of ``count`` rows from ``first`` on with a panel or a pair; see ``block_dot``.

    ``weights`` are the addresses of values and scales; ``ahead`` are those of two panels to prefetch.
    """
    values, scales = weights
    row, turn = 0, 0
    while row < count:
        n = tokens_at_once(row, count, operand, a.G)
        terms, sums = a.terms + _first_term(a, first + row), out + TILE_BYTES * row
        near, scales_near = ahead[0] if turn == 0 else ahead[1]
        if turn > 1:  # both have been prefetched already
            near, scales_near = values, values
        block_dot(
            operand, bits, group, has_minima, scale_format, values, scales, near, scales_near, terms, sums, stride,
            a.G, n,
        )  # fmt: skip
        row, turn = row + n, turn + 1
    parts, counts, row_bytes = a.parts + first * _part_bytes(a), a.counts + 4 * first, _part_bytes(a)
    add_large_parts(
        operand, bits, group, has_minima, scale_format, values, scales, out, stride, count, parts, row_bytes, counts
    )


@inlined
def _finish_item(a: Any, first: int, count: int, panels: Any, sums: int, stride: int) -> None:
    """Write a few rows of both panels at a time, so that adjacent outputs are written together."""
    if a.gate:
        finish(a, sums, sums + stride, first, count, panels[0] * PANEL)
        return
    for row in range(0, count, ROWS_TO_FINISH):
        rows = min(ROWS_TO_FINISH, count - row)
        for half in range(1 + (panels[1] > panels[0])):
            out = sums + half * stride + TILE_BYTES * row
            finish(a, out, out, first + row, rows, (panels[0] + half) * PANEL)


@functools.cache
def _multiply_task(bits: int, group: int, has_minima: int, scale_format: int) -> int:
    """Task over pairs of panels of the output."""
    value_bytes, factor_bytes = group * bits // 8 * PANEL, scale_bytes(scale_format, group, 1 + has_minima)
    tile = tile_bytes(group)
    operand = PAIR_IN_TILES if tile else PAIR
    half_bytes = pair_bytes(bits, group, has_minima, scale_format) // 2
    scales_ahead = AHEAD * factor_bytes // value_bytes

    def multiply(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        tiles, pair = whole_lines(2 * a.rows, PANEL), whole_lines(a.G * a.is_pair, half_bytes // 2)
        sums, apart, stride = tiles.ctypes.data, pair.ctypes.data, a.rows * TILE_BYTES
        if tile and a.is_pair:
            take_tiles(TOKENS_TOGETHER, tile)
        for item in range(begin, end):
            first = item // a.columns * a.rows
            count, panels, later = min(a.rows, a.T - first), _panels_of(a, item), _panels_of(a, item + 1)
            for half in range(2 if a.is_pair or a.gate else 1):
                weights = _panel_at(a, panels[half], value_bytes, factor_bytes)
                if a.is_pair:
                    out = apart + half * half_bytes
                    take_apart(bits, group, has_minima, scale_format, weights[0], weights[1], out, a.G)
                else:
                    near = weights[0] + AHEAD, weights[1] + scales_ahead
                    out = sums + half * stride
                    _sum_up(
                        ONE_PANEL, bits, group, has_minima, scale_format, a, first, count, weights, (near, near), out,
                        stride,
                    )  # fmt: skip
            if a.is_pair:
                near = (
                    _panel_at(a, later[0], value_bytes, factor_bytes),
                    _panel_at(a, later[1], value_bytes, factor_bytes),
                )
                _sum_up(operand, bits, group, has_minima, scale_format, a, first, count, (apart, 0), near, sums, stride)
            _finish_item(a, first, count, panels, sums, stride)
        if tile and a.is_pair:
            give_tiles()
        keep((tiles, pair))

    return compiled_task(multiply)


@inlined
def _divide(a: Any, threads: int) -> Any:
    """Choose the form of items; returns their number and how many are worth giving to a thread."""
    pairs = (a.N + 2 * PANEL - 1) // (2 * PANEL)
    a.is_pair = a.pair_from <= a.T and (a.T >= LEAST_TOKENS or pairs >= 2 * threads)
    a.columns = pairs if a.is_pair or a.gate else (a.N + PANEL - 1) // PANEL
    blocks = (a.T + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
    blocks = max(1, blocks, min(a.T // LEAST_TOKENS, ITEMS_A_THREAD * threads // pairs))
    together = blocks * TOKENS_TOGETHER
    a.rows = max(1, (a.T + together - 1) // together) * TOKENS_TOGETHER
    work = (min(a.T, a.rows) + 1) * a.G * a.group * ((a.N + a.columns - 1) // a.columns)
    return (a.T + a.rows - 1) // a.rows * a.columns, max(1, WORK_A_PIECE // work)


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    terms = np.empty((a.T + TOKENS_TOGETHER) * a.G * term_bytes(a.group, a.joined), np.int8)
    parts, counts = np.empty(a.T * _part_bytes(a), np.int8), np.empty(a.T, np.int32)
    a.terms, a.parts, a.counts = terms.ctypes.data, parts.ctypes.data, counts.ctypes.data
    items = (a.T + TOKENS_TOGETHER - 1) // TOKENS_TOGETHER  # two threads would write to the same cache lines
    run(pool, a.prepare, arguments, items, max(1, NUMBERS_A_PIECE // (a.G * a.group * TOKENS_TOGETHER)))
    items, piece = _divide(a, width(pool))
    run(pool, a.multiply, arguments, items, piece)
    keep((terms, parts, counts))
    return 0


@block_linear.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def block_linear_numba(x_TK: Tensor, packed: PackedBlocks, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.block_linear``; activations become terms of 8 bits, with the error that its contract states."""
    bias_N, norm_K, eps, residual_TN, activation = fused
    T, (N, K), group = len(x_TK), packed.shape, packed.x_group
    if activation not in GATES or (activation and N % (2 * PANEL)):

        def multiply(normed_TK: Tensor) -> Tensor:
            return block_linear_numba(normed_TK, packed, Fused(bias_N))

        return compose(x_TK, fused, multiply)
    width = fused.width(N)
    check_linear("block_linear", x_TK, packed.shape, fused)
    x = x_TK.contiguous()
    out_TN = residual_TN if residual_TN is not None else torch.empty(T, width)
    has_minima, scale_format = int(packed.has_minima), format_of(packed)
    values = (
        *(address(bias_N), address(residual_TN), out_TN.data_ptr(), GATES[activation], T, N),
        *(_prepare_task(), _multiply_task(packed.bits, group, has_minima, scale_format)),
        *(x.data_ptr(), address(norm_K), eps, address(packed.order)),
        *(packed.values.data_ptr(), packed.scales.data_ptr(), packed.zero_point, has_minima, group),
        *(group // packed.group, K // group, pair_from(scale_format), *[0] * 6),
    )
    call(_driver(), ARGUMENTS, values)
    return out_TN
