"""``block_linear``: activations to int8, then panels of 16 outputs, shared among threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.block_linear import PANEL, PackedBlocks, block_linear
from octavo.ops.cpu.block_dot import PAIR_FROM, add_second_terms, block_dot, take_apart, tokens_at_once
from octavo.ops.cpu.calls import call
from octavo.ops.cpu.compiled import compiled_driver, compiled_task, inlined
from octavo.ops.cpu.epilogue import EPILOGUE, GATES, TILE_BYTES, finish
from octavo.ops.cpu.host import FLOAT_FEATURES, missing
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.quantize import SIDE_BYTES, TOKENS_TOGETHER, quantize_row
from octavo.ops.cpu.rms_norm import normalise_row
from octavo.ops.cpu.tensors import address, check_linear
from octavo.ops.cpu.threads import run
from octavo.ops.cpu.vector_ir import AHEAD, FLOAT16, FLOAT32, FORMAT_BYTES
from octavo.ops.linear import Activation, compose

TOKENS_AT_ONCE = 258
"""Rows of activations that stay in the second-level cache while panel after panel goes over them."""
MULTIPLICATIONS_A_CHUNK = 400_000
"""About three microseconds of work: less is not worth handing to another thread."""
NUMBERS_A_CHUNK = 2048
ROWS_TO_FINISH = 8

ARGUMENTS = fields(
    **EPILOGUE,
    prepare=int,
    collect=int,
    multiply=int,
    x=int,
    norm=int,
    eps=float,
    values=int,
    scales=int,
    zero_point=int,
    has_minima=int,
    group=int,
    G=int,
    firsts=int,
    seconds=int,
    marks=int,
    collected=int,
    collected_tokens=int,
    collected_starts=int,
)
"""The last six are made by the driver: terms [T, G] of each kind, int8 [T, G] that says whether there is a second one,
and what ``collect`` makes of those."""


@inlined
def _first_term(a: Any, t: int) -> Any:
    """Where those of row t begin, in bytes."""
    together, within = t // TOKENS_TOGETHER, t % TOKENS_TOGETHER
    return (together * a.G * TOKENS_TOGETHER + within) * (a.group + SIDE_BYTES)


@functools.cache
def _prepare_task() -> int:
    """Task over rows: normalise, quantise."""

    def prepare(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        K = a.G * a.group
        normed, rest = np.empty(K, np.float32), np.empty(a.group, np.float32)
        for t in range(begin, end):
            x, at = a.x + 4 * K * t, a.G * (a.group + SIDE_BYTES) * t
            first = a.firsts + _first_term(a, t)
            if a.norm:
                normalise_row(x, a.norm, normed.ctypes.data, K, K, a.eps)
                x = normed.ctypes.data
            places = x, rest.ctypes.data, first, a.seconds + at, a.marks + a.G * t
            quantize_row(a.group, a.has_minima, *places, np.int32(a.zero_point), a.G)
        keep((normed, rest))

    return compiled_task(prepare)


@functools.cache
def _collect_task() -> int:
    """Task over parts of TOKENS_AT_ONCE rows: second terms, wherever there are some, group by group in one place.

    ``collected`` [T * G] gets them, and ``collected_tokens`` int32 [T * G] their rows, counted from the part's first.
    Those of group g of part p begin where ``collected_starts`` int32 [parts, G + 1] says.
    """

    def collect(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        G, words, numbers = a.G, (a.group + SIDE_BYTES) // 8, a.T * a.G
        begins, tokens = view(a.collected_starts, end * (G + 1), np.int32), view(a.collected_tokens, numbers, np.int32)
        marks = view(a.marks, numbers, np.int8)
        source, out = view(a.seconds, numbers * words, np.int64), view(a.collected, numbers * words, np.int64)
        for part in range(begin, end):
            first = part * TOKENS_AT_ONCE
            n = first * G
            for g in range(G):
                begins[part * (G + 1) + g] = n
                for t in range(first, min(first + TOKENS_AT_ONCE, a.T)):
                    if marks[t * G + g]:
                        tokens[n] = t - first
                        for i in range(words):
                            out[n * words + i] = source[(t * G + g) * words + i]
                        n += 1
            begins[part * (G + 1) + G] = n

    return compiled_task(collect)


@inlined
def _panels_of(a: Any, item: int) -> Any:
    """The two panels of an item of ``multiply``: of gates and their ups, or neighbours; the last may be both."""
    panels = (a.N + PANEL - 1) // PANEL
    if a.gate:
        return item, item + panels // 2
    return 2 * item, min(2 * item + 1, panels - 1)


@inlined
def _panel_at(a: Any, panel: int, value_bytes: int, scale_bytes: int) -> Any:
    """Addresses of a panel's values and scales."""
    return a.values + panel * a.G * value_bytes, a.scales + panel * a.G * scale_bytes


@inlined
def _sum_up(
    is_pair: int,
    bits: int,
    group: int,
    has_minima: int,
    scale_format: int,
    a: Any,
    first: int,
    count: int,
    weights: Any,
    ahead: Any,
    out: int,
    stride: int,
) -> None:
    """Products of ``count`` rows from ``first`` on with a panel or a pair; see ``block_dot``.

    ``weights`` are the addresses of values and scales, and so are ``ahead`` those of two panels to be brought near.
    """
    values, scales = weights
    row, turn = 0, 0
    while row < count:
        n = tokens_at_once(row, count, is_pair)
        terms, sums = a.firsts + _first_term(a, first + row), out + TILE_BYTES * row
        near, scales_near = ahead[0] if turn == 0 else ahead[1]
        if turn > 1:  # both have been asked for; what is here is near
            near, scales_near = values, values
        block_dot(
            is_pair,
            bits,
            group,
            has_minima,
            scale_format,
            values,
            scales,
            near,
            scales_near,
            terms,
            sums,
            stride,
            a.G,
            n,
        )
        row, turn = row + n, turn + 1
    starts = a.collected_starts + 4 * (first // TOKENS_AT_ONCE) * (a.G + 1)
    seconds, tokens = a.collected, a.collected_tokens
    add_second_terms(
        is_pair, bits, group, has_minima, scale_format, values, scales, seconds, out, stride, a.G, starts, tokens
    )


@inlined
def _finish_item(a: Any, first: int, count: int, panels: Any, sums: int, stride: int) -> None:
    """A few rows of both panels at a time: what lies side by side is written together."""
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
    value_bytes, scale_bytes = group * bits // 8 * PANEL, (1 + has_minima) * PANEL * FORMAT_BYTES[scale_format]
    half_bytes, scales_ahead = (group + 4 * (1 + has_minima)) * PANEL, AHEAD * scale_bytes // value_bytes

    def multiply(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        is_pair, most = a.T >= PAIR_FROM, min(a.T, TOKENS_AT_ONCE)
        tiles, pair = np.empty((2, most, PANEL), np.float32), np.empty(2 * a.G * half_bytes if is_pair else 0, np.uint8)
        sums, apart, stride = tiles.ctypes.data, pair.ctypes.data, most * TILE_BYTES
        for first in range(0, a.T, TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, a.T - first)
            for item in range(begin, end):
                panels, later = _panels_of(a, item), _panels_of(a, item + 1)
                for half in range(2):
                    weights = _panel_at(a, panels[half], value_bytes, scale_bytes)
                    if is_pair:
                        out = apart + half * half_bytes
                        take_apart(bits, group, has_minima, scale_format, weights[0], weights[1], out, a.G)
                    else:
                        near = weights[0] + AHEAD, weights[1] + scales_ahead
                        _sum_up(
                            0,
                            bits,
                            group,
                            has_minima,
                            scale_format,
                            a,
                            first,
                            count,
                            weights,
                            (near, near),
                            sums + half * stride,
                            stride,
                        )
                if is_pair:
                    near = (
                        _panel_at(a, later[0], value_bytes, scale_bytes),
                        _panel_at(a, later[1], value_bytes, scale_bytes),
                    )
                    _sum_up(1, bits, group, has_minima, scale_format, a, first, count, (apart, 0), near, sums, stride)
                _finish_item(a, first, count, panels, sums, stride)
        keep((tiles, pair))

    return compiled_task(multiply)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        numbers = a.T * a.G * a.group
        num_parts = (a.T + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
        term_bytes, terms = a.group + SIDE_BYTES, a.T * a.G
        firsts, seconds = (
            np.empty((a.T + TOKENS_TOGETHER) * a.G * term_bytes, np.int8),
            np.empty(terms * term_bytes, np.int8),
        )
        marks, collected = np.empty(terms, np.int8), np.empty(terms * term_bytes, np.int8)
        tokens, starts = np.empty(terms, np.int32), np.empty(num_parts * (a.G + 1), np.int32)
        a.firsts, a.seconds, a.marks = firsts.ctypes.data, seconds.ctypes.data, marks.ctypes.data
        a.collected, a.collected_tokens, a.collected_starts = (
            collected.ctypes.data,
            tokens.ctypes.data,
            starts.ctypes.data,
        )
        run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_CHUNK // (a.G * a.group)))
        run(pool, a.collect, arguments, num_parts, 1)
        pairs = (a.N + 2 * PANEL - 1) // (2 * PANEL)
        chunks = max(1, numbers * a.N // MULTIPLICATIONS_A_CHUNK)
        run(pool, a.multiply, arguments, pairs, (pairs + chunks - 1) // chunks)
        keep((firsts, seconds, marks, collected, tokens, starts))
        return 0

    return compiled_driver(drive)


def _supports(dtype: torch.dtype) -> str | None:
    return missing(FLOAT_FEATURES) if dtype == torch.float32 else f"activations must be float32, got {dtype}"


@block_linear.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def block_linear_numba(
    x_TK: Tensor,
    packed: PackedBlocks,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """See ``ops.block_linear``; activations become terms of 8 bits, with the error that its contract states."""
    (T, K), N, G = x_TK.shape, packed.shape[0], packed.values.shape[1]
    if activation not in GATES or (activation and N % (2 * PANEL)):

        def multiply(normed_TK: Tensor) -> Tensor:
            return block_linear_numba(normed_TK, packed, bias_N)

        return compose(x_TK, norm_K, eps, residual_TN, activation, multiply)
    width = N // 2 if activation else N
    check_linear("block_linear", K, packed.shape, bias_N, norm_K, residual_TN, (T, width))
    x = x_TK.contiguous()
    out_TN = residual_TN if residual_TN is not None else torch.empty(T, width)
    has_minima = int(packed.has_minima)
    scale_format = FLOAT16 if packed.scales.dtype == torch.float16 else FLOAT32
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (
        *(address(bias_N), address(residual_TN), out_TN.data_ptr(), GATES[activation], T, N),
        *(_prepare_task(), _collect_task(), _multiply_task(packed.bits, packed.group, has_minima, scale_format)),
        *(x.data_ptr(), address(norm_K), eps, packed.values.data_ptr(), packed.scales.data_ptr()),
        *(packed.zero_point, has_minima, packed.group, G, *[0] * 6),
    )
    call(_driver(), arguments)
    return out_TN
