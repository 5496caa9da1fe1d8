"""``causal_conv`` and ``gated_conv`` in float32: threads take blocks of channels, for all rows of all sequences."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from octavo.ops.recurrent.causal_conv import causal_conv
from octavo.ops.recurrent.gated_conv import gated_conv
from octavo.ops.recurrent.recurrence import StateRows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task, driver, emitted, inlined
from octavo_kernels.cpu.linear.epilogue import NO_GATE, SILU, gated
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.recurrent.recurrence import fits, rows_of, state_arguments
from octavo_kernels.cpu.tensors import address, declines_activations
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import LANES, F32x16, Loop, constant, fma, i64, load, offset, store

BLOCK = 64
"""Channels of a block: four vectors."""
CHUNK = 32
"""Rows of a sequence that are computed together."""
NUMBERS_A_PIECE = 4096
ARGUMENTS = fields(
    "starts lengths slots marks S T num_slots state convolve C W x before after stride weight bias activation out"
)
"""Rows of ``x`` and of the gates ``before`` and ``after`` the convolution (0: none) are ``stride`` bytes apart."""


@emitted()
def _weigh(
    b: ir.IRBuilder, width: ir.Value, inputs: ir.Value, weight: ir.Value, bias: ir.Value, activation: ir.Value,
    out: ir.Value,
) -> None:  # fmt: skip
    """A row of BLOCK outputs, from ``width`` rows of inputs and of weights; all but the first are addresses."""
    vectors = [4 * LANES * v for v in range(BLOCK // LANES)]
    with Loop(b, width, [load(b, F32x16, bias, at) for at in vectors]) as loop:
        x, factors = (offset(b, base, (loop.index, 4 * BLOCK)) for base in (inputs, weight))
        products = [(load(b, F32x16, factors, at), load(b, F32x16, x, at)) for at in vectors]
        loop.carried = [fma(b, *pair, total) for pair, total in zip(products, loop.carried, strict=True)]
    is_gated = b.icmp_signed("==", activation, i64(SILU))
    for at, total in zip(vectors, loop.results, strict=True):
        acted = gated(b, i64(SILU), total, constant(F32x16, 1.0))
        store(b, b.select(is_gated, acted, total), out, at)


@emitted()
def _advance(
    b: ir.IRBuilder, width: ir.Value, past: ir.Value, past_stride: ir.Value, x: ir.Value, before: ir.Value,
    after: ir.Value, weight: ir.Value, bias: ir.Value, activation: ir.Value, out: ir.Value,
) -> None:  # fmt: skip
    """A row of BLOCK outputs of a sequence that has been computed before, and its next state: ``width`` - 1 rows.

    All but the first, the stride in bytes of the state's rows and the activation are addresses; gates may be 0: none.
    """
    vectors = [4 * LANES * v for v in range(BLOCK // LANES)]

    def factors(address: ir.Value) -> list[ir.Value]:
        is_given = b.icmp_signed("!=", address, i64(0))
        readable, one = b.select(is_given, address, x), constant(F32x16, 1.0)
        return [b.select(is_given, load(b, F32x16, readable, at), one) for at in vectors]

    newest = [b.fmul(load(b, F32x16, x, at), gate) for at, gate in zip(vectors, factors(before), strict=True)]
    oldest, last = [load(b, F32x16, past, at) for at in vectors], b.sub(width, i64(1))
    pairs = zip(vectors, oldest, strict=True)
    totals = [fma(b, load(b, F32x16, weight, at), y, load(b, F32x16, bias, at)) for at, y in pairs]
    with Loop(b, b.sub(last, i64(1)), totals) as loop:
        to, w = b.add(past, b.mul(loop.index, past_stride)), b.add(loop.index, i64(1))
        source, own = b.add(to, past_stride), offset(b, weight, (w, 4 * BLOCK))
        for v, at in enumerate(vectors):
            y = load(b, F32x16, source, at)
            loop.carried[v] = fma(b, load(b, F32x16, own, at), y, loop.carried[v])
            store(b, y, to, at)
    own, to = offset(b, weight, (last, 4 * BLOCK)), b.add(past, b.mul(b.sub(last, i64(1)), past_stride))
    is_gated = b.icmp_signed("==", activation, i64(SILU))
    for at, y, total, gate in zip(vectors, newest, loop.results, factors(after), strict=True):
        store(b, y, to, at)
        total = fma(b, load(b, F32x16, own, at), y, total)
        acted = b.select(is_gated, gated(b, i64(SILU), total, constant(F32x16, 1.0)), total)
        store(b, b.fmul(acted, gate), out, at)


@inlined
def _product(x: int, gate: int, out: int, count: int) -> None:
    """``count`` numbers, times a gate if there is one."""
    numbers, result = view(x, count, np.float32), view(out, count, np.float32)
    if gate:
        factors = view(gate, count, np.float32)
        for i in range(count):
            result[i] = numbers[i] * factors[i]
    else:
        for i in range(count):
            result[i] = numbers[i]


@inlined
def _convolve_rows(a: Any, first: int, count: int, column: int, columns: int, inputs: Any, numbers: Any) -> None:
    """Columns of ``count`` rows from ``first`` on, whose inputs lie behind those of W - 1 rows before them."""
    place, result = 4 * column, numbers[a.W + 1].ctypes.data
    for t in range(count):
        at = place + (first + t) * a.stride
        _product(a.x + at, a.before + at if a.before else 0, inputs[a.W - 1 + t].ctypes.data, columns)
    for t in range(count):
        row = first + t
        out = a.out + place + 4 * row * a.C
        source, bias = inputs[t].ctypes.data, numbers[a.W].ctypes.data
        _weigh(a.W, source, numbers.ctypes.data, bias, a.activation, out if columns == BLOCK else result)
        gate = a.after + place + row * a.stride if a.after else 0
        if gate or columns < BLOCK:
            _product(out if columns == BLOCK else result, gate, out, columns)


@inlined
def _keep_window(a: Any, inputs: Any, first: int, slot: int, column: int, columns: int) -> None:
    """Write the window that begins at an input to a slot."""
    for w in range(a.W - 1):
        to = a.state + 4 * ((slot * (a.W - 1) + w) * a.C + column)
        _product(inputs[first + w].ctypes.data, 0, to, columns)


@inlined
def _keep_marked(a: Any, first: int, count: int, inputs: Any, column: int, columns: int) -> None:
    """Write the windows after those of ``count`` rows from ``first`` on that have a mark."""
    marks = view(a.marks, a.T, np.int32)
    for t in range(count):
        if marks[first + t] >= 0:
            _keep_window(a, inputs, t + 1, marks[first + t], column, columns)


@functools.cache
def _task() -> int:
    """Task over blocks of channels."""

    def convolve(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        starts, lengths = view(a.starts, a.S + 1, np.int32), view(a.lengths, a.S, np.int32)
        slots = view(a.slots, a.S, np.int32)
        inputs, numbers = np.zeros((a.W - 1 + CHUNK, BLOCK), np.float32), np.zeros((a.W + 2, BLOCK), np.float32)
        for index in range(begin, end):
            column = BLOCK * index
            columns = min(BLOCK, a.C - column)
            for w in range(a.W):
                _product(a.weight + 4 * (w * a.C + column), 0, numbers[w].ctypes.data, columns)
            if a.bias:
                _product(a.bias + 4 * column, 0, numbers[a.W].ctypes.data, columns)
            for s in range(a.S):
                first, stop, slot = starts[s], starts[s + 1], slots[s]
                if stop <= first or slot < 0:
                    continue
                past = a.state + 4 * (slot * (a.W - 1) * a.C + column)
                if columns == BLOCK and stop - first == 1 and lengths[s] > 1 and a.W > 1 and not a.marks:
                    at, out = 4 * column + first * a.stride, a.out + 4 * (column + first * a.C)
                    before, after = a.before + at if a.before else 0, a.after + at if a.after else 0
                    weight, bias = numbers.ctypes.data, numbers[a.W].ctypes.data
                    _advance(a.W, past, 4 * a.C, a.x + at, before, after, weight, bias, a.activation, out)
                    continue
                for w in range(a.W - 1):
                    if lengths[s] == stop - first:
                        inputs[w] = 0
                    else:
                        _product(past + 4 * w * a.C, 0, inputs[w].ctypes.data, columns)
                while first < stop:
                    count = min(CHUNK, stop - first)
                    _convolve_rows(a, first, count, column, columns, inputs, numbers)
                    if a.marks:
                        _keep_marked(a, first, count, inputs, column, columns)
                    for w in range(a.W - 1):
                        inputs[w] = inputs[count + w]
                    first += count
                _keep_window(a, inputs, 0, slot, column, columns)
        keep((inputs, numbers))

    return compiled_task(convolve)


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    if not fits(a):
        return 1
    run(pool, a.convolve, arguments, (a.C + BLOCK - 1) // BLOCK, max(1, NUMBERS_A_PIECE // (BLOCK * max(1, a.T))))
    return 0


def convolve(
    x: tuple[Tensor, Tensor | None, Tensor | None],
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None,
) -> Tensor:
    """The convolution of x, with a gate before it and one after it: columns of one tensor."""
    x_TC, before, after = x
    T, (W, C) = len(x_TC), weight_WC.shape
    if state.shape[1:] != (W - 1, C) or state.dtype != torch.float32 or x_TC.shape[1] != C:
        raise ValueError(f"causal_conv: {W} weights of {C} channels, x {list(x_TC.shape)}, state {list(state.shape)}")
    weight, bias = weight_WC.float().contiguous(), None if bias_C is None else bias_C.float().contiguous()
    out_TC = torch.empty(T, C)
    values = (
        *(*state_arguments(rows, T, state), _task(), C, W),
        *(x_TC.data_ptr(), address(before), address(after), 4 * x_TC.stride(0)),
        *(weight.data_ptr(), address(bias), SILU if activation else NO_GATE, out_TC.data_ptr()),
    )
    call(_driver(), ARGUMENTS, values, "causal_conv: rows or slots do not fit the tensors")
    return out_TC


@causal_conv.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def causal_conv_numba(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """See ``ops.causal_conv``. Raises ``IndexError`` when rows or slots do not fit the tensors."""
    return convolve((rows_of(x_TC), None, None), weight_WC, bias_C, state, rows, activation)


@gated_conv.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def gated_conv_numba(
    bcx_T3C: Tensor, weight_WC: Tensor, bias_C: Tensor | None, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.gated_conv``. Raises ``IndexError`` when rows or slots do not fit the tensors."""
    b_TC, c_TC, x_TC = rows_of(bcx_T3C).chunk(3, dim=-1)
    return convolve((x_TC, b_TC, c_TC), weight_WC, bias_C, state, rows, None)
