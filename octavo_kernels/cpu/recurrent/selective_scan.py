"""``selective_scan``: threads take vectors of channels, whose states stay in the first-level cache while all rows of a
sequence pass. Channels do not depend on each other, and the numbers of a state are added in their order, so a row's
bits depend on no other row of the step."""

from __future__ import annotations

import functools

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.selective_scan import ScanChannels, selective_scan
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import Constant, compiled_task, driver, emitted
from octavo_kernels.cpu.half import rounded
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.recurrent.recurrence import MULTIPLICATIONS_A_PIECE, copy, fits, move, rows_of, state_arguments
from octavo_kernels.cpu.tensors import FORMATS, declines_activations, rows_at
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import (
    F32,
    FORMAT_BYTES,
    LANES,
    F32x16,
    Loop,
    constant,
    exp,
    fma,
    load,
    offset,
    softplus,
    splat,
    store,
)

MULTIPLICATIONS = 16
"""What a number of a state takes for a row, its decay included."""
ARGUMENTS = fields(
    "starts lengths slots marks S T num_slots state scan K V x x_stride dt dt_stride b b_stride c c_stride a_log bias "
    "d out"
)
"""V channels; strides in bytes."""


@emitted()
def _rates(b: ir.IRBuilder, count: ir.Value, at: ir.Value) -> None:
    """``-e ** x`` of ``count`` vectors at an address, in place."""
    with Loop(b, count, []) as loop:
        place = offset(b, at, (loop.index, 4 * LANES))
        store(b, b.fneg(exp(b, load(b, F32x16, place))), place)


@emitted()
def _advance(
    b: ir.IRBuilder, number_format: Constant, K: ir.Value, own: ir.Value, rates: ir.Value, x_at: ir.Value, dt: ir.Value,
    fixed: ir.Value, b_at: ir.Value, c_at: ir.Value, out: ir.Value,
) -> None:  # fmt: skip
    """One row of a vector of channels: its next states ``own`` [K, LANES], rounded to a number format, and outputs.

    All but the first two are addresses; ``fixed`` has the biases of time steps and then d.
    """
    x = load(b, F32x16, x_at)
    step = softplus(b, b.fadd(load(b, F32x16, dt), load(b, F32x16, fixed)))
    added = b.fmul(step, x)
    with Loop(b, K, [constant(F32x16, 0.0)]) as loop:
        place, rate = (offset(b, base, (loop.index, 4 * LANES)) for base in (own, rates))
        key, query = (splat(b, load(b, F32, offset(b, base, (loop.index, 4)))) for base in (b_at, c_at))
        decay = exp(b, b.fmul(load(b, F32x16, rate), step))
        state = rounded(b, number_format, fma(b, key, added, b.fmul(decay, load(b, F32x16, place))))
        store(b, state, place)
        loop.carried = [fma(b, query, state, loop.carried[0])]
    store(b, fma(b, load(b, F32x16, fixed, 4 * LANES), x, loop.results[0]), out)


@functools.cache
def _task(number_format: int) -> int:
    """Task over sequences and vectors of channels; the state has a number format."""
    item = FORMAT_BYTES[number_format]

    def scan(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        starts, lengths = view(a.starts, a.S + 1, np.int32), view(a.lengths, a.S, np.int32)
        slots, vectors = view(a.slots, a.S, np.int32), (a.V + LANES - 1) // LANES
        own, rates = np.zeros((a.K, LANES), np.float32), np.zeros((a.K, LANES), np.float32)
        room = np.zeros((5, LANES), np.float32)
        x, dt, out, fixed = (room[0].ctypes.data, room[1].ctypes.data, room[2].ctypes.data, room[3].ctypes.data)
        for index in range(begin, end):
            s, column = index // vectors, index % vectors * LANES
            count, slot, columns = starts[s + 1] - starts[s], slots[s], min(LANES, a.V - column)
            if count <= 0 or slot < 0:
                continue
            for k in range(a.K):
                copy(a.a_log + 4 * (k * a.V + column), rates[k].ctypes.data, columns)
            _rates(a.K, rates.ctypes.data)
            copy(a.bias + 4 * column, fixed, columns)
            copy(a.d + 4 * column, room[4].ctypes.data, columns)
            at = a.state + item * (slot * a.K * a.V + column)
            if lengths[s] == count:
                own[:] = 0
            else:
                move(a, number_format, at, own, columns, False)
            for t in range(starts[s], starts[s + 1]):
                copy(a.x + t * a.x_stride + 4 * column, x, columns)
                copy(a.dt + t * a.dt_stride + 4 * column, dt, columns)
                b, c = a.b + t * a.b_stride, a.c + t * a.c_stride
                _advance(number_format, a.K, own.ctypes.data, rates.ctypes.data, x, dt, fixed, b, c, out)
                copy(out, a.out + 4 * (t * a.V + column), columns)
                if a.marks:
                    mark = view(a.marks, a.T, np.int32)[t]
                    if mark >= 0:
                        to = a.state + item * (mark * a.K * a.V + column)
                        move(a, number_format, to, own, columns, True)
            move(a, number_format, at, own, columns, True)
        keep((own, rates, room))

    return compiled_task(scan)


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    if not fits(a):
        return 1
    items = a.S * ((a.V + LANES - 1) // LANES)
    work = MULTIPLICATIONS * a.T * a.K * a.V
    run(pool, a.scan, arguments, items, max(1, items * MULTIPLICATIONS_A_PIECE // max(1, work)))
    return 0


@selective_scan.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def selective_scan_numba(
    x_TC: Tensor, dt_TC: Tensor, b_TK: Tensor, c_TK: Tensor, channels: ScanChannels, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.selective_scan``. Raises ``IndexError`` when rows or slots do not fit the tensors."""
    (K, C), T = channels.a_log_KC.shape, len(x_TC)
    shapes = [list(x.shape) for x in (x_TC, dt_TC, b_TK, c_TK)]
    if shapes != [[T, C], [T, C], [T, K], [T, K]] or state.shape[1:] != (1, K, C) or state.dtype not in FORMATS:
        raise ValueError(f"selective_scan: {C} channels of {K}; inputs {shapes}, state {state.shape}, {state.dtype}")
    inputs = [rows_of(x.float()) for x in (x_TC, dt_TC, b_TK, c_TK)]
    fixed = [x.float().contiguous() for x in channels]
    out = torch.empty(T, C)
    values = (
        *(*state_arguments(rows, T, state), _task(FORMATS[state.dtype]), K, C),
        *(word for x in inputs for word in rows_at(x)),
        *(*(x.data_ptr() for x in fixed), out.data_ptr()),
    )
    call(_driver(), ARGUMENTS, values, "selective_scan: rows or slots do not fit the tensors")
    return out
