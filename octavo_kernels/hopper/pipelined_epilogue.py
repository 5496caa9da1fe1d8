"""The end of a tile of ``pipelined_gemm``: the sums of its programs, then scales of rows, bias, gate and residual.

Shapes: a tile is [outputs, rows]. The rows of an expert's last product go back to the order of their pairs of a token
and an expert, times the pair's share.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo_kernels.hopper.pipelined_tiles import programs_of
from octavo_kernels.triton.linear.tile_epilogue import finish

_ROWS_AT_ONCE = gl.constexpr(32)


@gluon.jit
def end_tile(
    acc: gl.tensor, up: gl.tensor, scales_ptr: gl.tensor, bias_ptr: gl.tensor, residual_ptr: gl.tensor,
    order_ptr: gl.tensor, share_ptr: gl.tensor, out_ptr: gl.tensor, sums_ptr: gl.tensor, counters_ptr: gl.tensor,
    start: gl.tensor, units: gl.tensor, grain: gl.tensor, programs: gl.tensor, count: gl.tensor, first: gl.tensor,
    first_row: gl.tensor, stop_row: gl.tensor, num_outputs: gl.tensor, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
) -> None:  # fmt: skip
    """Store the tile, or a program's share of its sums; the last program to have a share adds them in their order."""
    begun_by, ended_by = programs_of(start, units, grain, programs, count)
    is_whole = begun_by == ended_by
    if not is_whole:
        _store_share(sums_ptr, acc, up, begun_by, gl.program_id(0), ACTIVATION)
        gl.thread_barrier()
        done = gl.atomic_add(counters_ptr + begun_by, 1, sem="acq_rel", scope="gpu")
        if done == ended_by - begun_by:
            gl.store(counters_ptr + begun_by, 0)
            acc, up = _add_shares(sums_ptr, acc, up, begun_by, ended_by, ACTIVATION)
            is_whole = True
    if is_whole:
        _store_tile(
            acc, up, scales_ptr, bias_ptr, residual_ptr, order_ptr, share_ptr, out_ptr, first, first_row, stop_row,
            num_outputs, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip


@gluon.jit
def _share(
    sums_ptr: gl.tensor, acc: gl.tensor, begun_by: gl.tensor, program: gl.tensor, GATED: gl.constexpr
) -> gl.tensor:
    """Where the sums of a program are, for a tile that another one or it itself has begun."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, acc.type.layout))
    place = (2 * program + (program == begun_by).to(gl.int32)).to(gl.int64) * ((2 if GATED else 1) * BLOCK_N * BLOCK_T)
    return sums_ptr + place + (n[:, None] * BLOCK_T + t[None, :])


@gluon.jit
def _store_share(
    sums_ptr: gl.tensor, acc: gl.tensor, up: gl.tensor, begun_by: gl.tensor, program: gl.tensor,
    ACTIVATION: gl.constexpr,
) -> None:  # fmt: skip
    at = _share(sums_ptr, acc, begun_by, program, ACTIVATION is not None)
    gl.store(at, acc)
    if ACTIVATION is not None:
        gl.store(at + acc.shape[0] * acc.shape[1], up)


@gluon.jit
def _add_shares(
    sums_ptr: gl.tensor, acc: gl.tensor, up: gl.tensor, begun_by: gl.tensor, ended_by: gl.tensor,
    ACTIVATION: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Past the first-level cache, which may hold what was there before."""
    LAYOUT: gl.constexpr = acc.type.layout
    none = gl.zeros([acc.shape[0], acc.shape[1]], gl.float32, LAYOUT)
    acc, up = none, none
    for program in range(begun_by, ended_by + 1):
        at = _share(sums_ptr, acc, begun_by, program, ACTIVATION is not None)
        acc += gl.load(at, cache_modifier=".cg")
        if ACTIVATION is not None:
            up += gl.load(at + acc.shape[0] * acc.shape[1], cache_modifier=".cg")
    return acc, up


@gluon.jit
def _store_tile(
    acc: gl.tensor, up: gl.tensor, scales_ptr: gl.tensor, bias_ptr: gl.tensor, residual_ptr: gl.tensor,
    order_ptr: gl.tensor, share_ptr: gl.tensor, out_ptr: gl.tensor, first: gl.tensor, first_row: gl.tensor,
    stop_row: gl.tensor, num_outputs: gl.tensor, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
) -> None:  # fmt: skip
    """Scales of rows, bias, gate and residual, for a few rows at a time: addresses take registers."""
    HALF: gl.constexpr = acc.shape[1] // 2
    if HALF > _ROWS_AT_ONCE // 2:
        low, high = _halves(acc)
        low_up, high_up = _halves(up)
        _store_tile(
            low, low_up, scales_ptr, bias_ptr, residual_ptr, order_ptr, share_ptr, out_ptr, first, first_row,
            stop_row, num_outputs, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip
        _store_tile(
            high, high_up, scales_ptr, bias_ptr, residual_ptr, order_ptr, share_ptr, out_ptr, first,
            first_row + HALF, stop_row, num_outputs, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip
    else:
        outputs = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        rows = first_row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        is_row = rows < stop_row
        if share_ptr is not None:
            rows = gl.load(order_ptr + rows, mask=is_row, other=0)
        at = rows.to(gl.int64)[None, :] * num_outputs + outputs[:, None]
        mask = is_row[None, :] & (outputs < num_outputs)[:, None]
        if scales_ptr is not None:
            own = gl.minimum(outputs, num_outputs - 1)
            acc *= gl.load(scales_ptr + own).to(gl.float32)[:, None]
            if ACTIVATION is not None:
                up *= gl.load(scales_ptr + num_outputs + own).to(gl.float32)[:, None]
        residual = 0.0
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + at, mask=mask, other=0.0).to(gl.float32)
        acc = finish(acc, up, residual, outputs, num_outputs, bias_ptr, ACTIVATION, ALPHA, LIMIT)
        if share_ptr is not None:
            acc *= gl.load(share_ptr + rows, mask=is_row, other=0.0)[None, :]
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _halves(sums: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """The first and the last rows of a tile [outputs, rows]; they are in registers of their own."""
    low, high = sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1)).split()
    return low, high
