"""``block_linear``: activations to int8, then panels of 16 outputs, shared among threads."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.block_linear import PANEL, PackedBlocks, block_linear
from octavo.ops.cpu.block_dot import add_second_terms, block_dot, tokens_at_once
from octavo.ops.cpu.calls import call
from octavo.ops.cpu.compiled import compiled_driver, compiled_task
from octavo.ops.cpu.epilogue import EPILOGUE, GATES, TILE_BYTES, finish
from octavo.ops.cpu.host import FLOAT_FEATURES, missing
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.quantize import quantize_row
from octavo.ops.cpu.rms_norm import normalise_row
from octavo.ops.cpu.tensors import address, check_linear
from octavo.ops.cpu.threads import run
from octavo.ops.cpu.vector_ir import FLOAT16, FLOAT32
from octavo.ops.linear import Activation, compose

TOKENS_AT_ONCE = 256
"""Rows of activations that stay in the second-level cache while panel after panel goes over them."""
MULTIPLICATIONS_A_CHUNK = 400_000
"""About three microseconds of work: less is not worth handing to another thread."""
NUMBERS_A_CHUNK = 2048

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
    q=int,
    q_scales=int,
    q_offsets=int,
    seconds=int,
    second_sides=int,
    second_tokens=int,
    second_starts=int,
)


@functools.cache
def _prepare_task() -> int:
    """Task over rows: normalise, quantise."""

    def prepare(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        K = a.G * a.group
        normed, rest = np.empty(K, np.float32), np.empty(a.group, np.float32)
        for t in range(begin, end):
            x = a.x + 4 * K * t
            if a.norm:
                normalise_row(x, a.norm, normed.ctypes.data, K, K, a.eps)
                x = normed.ctypes.data
            side = 8 * a.G * t
            places = x, rest.ctypes.data, a.q + 2 * K * t, a.q_scales + side, a.q_offsets + side
            quantize_row(a.group, a.has_minima, *places, np.int32(a.zero_point), a.G)
        keep((normed, rest))

    return compiled_task(prepare)


@functools.cache
def _collect_task() -> int:
    """Task over parts of TOKENS_AT_ONCE rows: second terms, wherever there are some, group by group in one place.

    ``seconds`` int8 [T * G, group] gets them, with their scales and offsets in ``second_sides`` [T * G, 2] and their
    rows, counted from the part's first, in ``second_tokens`` int32 [T * G]. Those of group g of part p begin where
    ``second_starts`` int32 [parts, G + 1] says.
    """

    def collect(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        G, words = a.G, a.group // 8
        begins, tokens = view(a.second_starts, end * (G + 1), np.int32), view(a.second_tokens, a.T * G, np.int32)
        scales, offsets = view(a.q_scales, a.T * 2 * G, np.int32), view(a.q_offsets, a.T * 2 * G, np.int32)
        sides, terms = view(a.second_sides, a.T * 2 * G, np.int32), view(a.seconds, a.T * G * words, np.int64)
        q = view(a.q, a.T * 2 * G * words, np.int64)
        for part in range(begin, end):
            first = part * TOKENS_AT_ONCE
            n = first * G
            for g in range(G):
                begins[part * (G + 1) + g] = n
                for t in range(first, min(first + TOKENS_AT_ONCE, a.T)):
                    term = t * 2 * G + G + g
                    if scales[term] != 0:
                        tokens[n], sides[2 * n], sides[2 * n + 1] = t - first, scales[term], offsets[term]
                        for i in range(words):
                            terms[n * words + i] = q[term * words + i]
                        n += 1
            begins[part * (G + 1) + G] = n

    return compiled_task(collect)


@functools.cache
def _multiply_task(bits: int, group: int, has_minima: int, scale_format: int) -> int:
    """Task over the panels of the output."""
    value_bytes = group * bits // 8 * PANEL
    scale_bytes = (1 + has_minima) * PANEL * (4 if scale_format == FLOAT32 else 2)

    def multiply(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        tiles = np.empty((2, min(a.T, TOKENS_AT_ONCE), PANEL), np.float32)
        sums, ups = tiles[0].ctypes.data, tiles[1].ctypes.data
        for first in range(0, a.T, TOKENS_AT_ONCE):
            last, side = min(first + TOKENS_AT_ONCE, a.T), 8 * a.G * first
            q, q_scales, q_offsets = a.q + 2 * a.G * group * first, a.q_scales + side, a.q_offsets + side
            starts = a.second_starts + 4 * (first // TOKENS_AT_ONCE) * (a.G + 1)
            for panel in range(begin, end):
                for half in range(2 if a.gate else 1):
                    at = (panel + half * (a.N // (2 * PANEL))) * a.G
                    values, scales, out = a.values + at * value_bytes, a.scales + at * scale_bytes, sums
                    if half:
                        out = ups
                    t = first
                    while t < last:
                        n, row = tokens_at_once(last - t), t - first
                        block_dot(
                            bits,
                            group,
                            has_minima,
                            scale_format,
                            values,
                            scales,
                            q + 2 * a.G * group * row,
                            q_scales + 8 * a.G * row,
                            q_offsets + 8 * a.G * row,
                            out + TILE_BYTES * row,
                            a.G,
                            n,
                        )
                        t += n
                    add_second_terms(
                        bits,
                        group,
                        has_minima,
                        scale_format,
                        values,
                        scales,
                        a.seconds,
                        a.second_sides,
                        out,
                        a.G,
                        starts,
                        a.second_tokens,
                    )
                finish(a, sums, ups, first, last - first, panel * PANEL)
        keep(tiles)

    return compiled_task(multiply)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        numbers = a.T * a.G * a.group
        num_parts = (a.T + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
        q, seconds = np.empty(2 * numbers, np.int8), np.empty(numbers, np.int8)
        sides, tokens = np.empty(2 * a.T * a.G, np.float32), np.empty(a.T * a.G, np.int32)
        starts = np.empty(num_parts * (a.G + 1), np.int32)
        q_scales, q_offsets = np.empty(2 * a.T * a.G, np.float32), np.empty(2 * a.T * a.G, np.float32)
        a.seconds, a.second_sides = seconds.ctypes.data, sides.ctypes.data
        a.second_tokens, a.second_starts = tokens.ctypes.data, starts.ctypes.data
        a.q, a.q_scales, a.q_offsets = q.ctypes.data, q_scales.ctypes.data, q_offsets.ctypes.data
        run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_CHUNK // (a.G * a.group)))
        run(pool, a.collect, arguments, num_parts, 1)
        panels = ((a.N // 2 if a.gate else a.N) + PANEL - 1) // PANEL
        chunks = max(1, numbers * a.N // MULTIPLICATIONS_A_CHUNK)
        run(pool, a.multiply, arguments, panels, (panels + chunks - 1) // chunks)
        keep((q, q_scales, q_offsets, seconds, sides, tokens, starts))
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
        *(packed.zero_point, has_minima, packed.group, G, *[0] * 7),
    )
    call(_driver(), arguments)
    return out_TN
