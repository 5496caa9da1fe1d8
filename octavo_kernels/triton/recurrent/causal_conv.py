"""``causal_conv`` and ``gated_conv`` for CUDA devices.

A program takes a few rows of a block of channels. Where every sequence has one row, it also moves the window of its
sequence on; for prompts a second kernel does that, as programs of other rows still read the window.

Shapes: T tokens of the step, S sequences, C channels, W width; a program's rows M and channels B.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.recurrent.causal_conv import causal_conv
from octavo.ops.recurrent.gated_conv import gated_conv
from octavo.ops.recurrent.recurrence import StateRows
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

ROWS, CHANNELS = 8, 256
"""Of a program."""


@triton.jit(do_not_specialize=["T", "S"])
def causal_conv_kernel(
    x_ptr: tl.tensor, before_ptr: tl.tensor, after_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor,
    state_ptr: tl.tensor, out_ptr: tl.tensor, starts_ptr: tl.tensor, lengths_ptr: tl.tensor, slots_ptr: tl.tensor,
    T: tl.tensor, S: tl.tensor, row_stride: tl.tensor, C: tl.constexpr, W: tl.constexpr, HAS_SILU: tl.constexpr,
    IS_SINGLE: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Outputs; and the windows after the step, if ``IS_SINGLE``: row s is that of sequence s."""
    t_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c_B = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c_B < C
    after_predecessor(PDL)
    if IS_SINGLE:
        seq_M = tl.minimum(t_M, S - 1)
    else:
        s_S = tl.arange(0, SEQUENCES)
        ends_S = tl.load(starts_ptr + 1 + s_S, mask=s_S < S, other=2147483647)
        seq_M = tl.minimum(tl.sum((ends_S[None, :] <= t_M[:, None]).to(tl.int32), 1), S - 1)
    first_M, end_M = tl.load(starts_ptr + seq_M), tl.load(starts_ptr + seq_M + 1)
    slot_M = tl.load(slots_ptr + seq_M)
    is_row_M = (t_M >= first_M) & (t_M < end_M) & (t_M < T) & (slot_M >= 0)
    has_past_M = tl.load(lengths_ptr + seq_M) > end_M - first_M
    window_ptrs = state_ptr + (slot_M.to(tl.int64) * (W - 1) * C)[:, None] + c_B[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + c_B, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        source_M = t_M - (W - 1) + w
        is_new = (is_row_M & (source_M >= first_M))[:, None] & is_channel[None, :]
        x = _input(x_ptr, before_ptr, source_M, row_stride, c_B, is_new)
        is_old = (is_row_M & has_past_M & (source_M < first_M))[:, None] & is_channel[None, :]
        old = tl.load(window_ptrs + (W - 1 + source_M - first_M)[:, None] * C, mask=is_old, other=0.0)
        weight = tl.load(weight_ptr + w * C + c_B, mask=is_channel, other=0.0).to(tl.float32)
        total += weight[None, :] * (x.to(tl.float32) + old.to(tl.float32))
    if HAS_SILU:
        total *= tl.sigmoid(total)
    is_in = is_row_M[:, None] & is_channel[None, :]
    dtype = out_ptr.dtype.element_ty
    if after_ptr is not None:
        gate = tl.load(after_ptr + t_M.to(tl.int64)[:, None] * row_stride + c_B[None, :], mask=is_in, other=0.0)
        total = total.to(dtype).to(tl.float32) * gate.to(tl.float32)
    tl.store(out_ptr + t_M.to(tl.int64)[:, None] * C + c_B[None, :], total.to(dtype), mask=is_in)
    if IS_SINGLE:
        for w in tl.static_range(W - 2):
            moved = tl.load(window_ptrs + (w + 1) * C, mask=is_in & has_past_M[:, None], other=0.0)
            tl.store(window_ptrs + w * C, moved, mask=is_in)
        x = _input(x_ptr, before_ptr, t_M, row_stride, c_B, is_in)
        tl.store(window_ptrs + (W - 2) * C, x.to(state_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def move_window_kernel(
    x_ptr: tl.tensor, before_ptr: tl.tensor, state_ptr: tl.tensor, starts_ptr: tl.tensor, lengths_ptr: tl.tensor,
    slots_ptr: tl.tensor, row_stride: tl.tensor, C: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The window of one sequence after its rows, for a block of channels."""
    s = tl.program_id(0)
    c_B = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    after_predecessor(PDL)
    first, end, slot = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1), tl.load(slots_ptr + s)
    num_rows = end - first
    if (num_rows > 0) & (slot >= 0):
        has_past = tl.load(lengths_ptr + s) > num_rows
        window_ptrs = state_ptr + slot.to(tl.int64) * (W - 1) * C + c_B
        for w in tl.static_range(W - 1):
            source = end - (W - 1) + w
            is_new = (source >= first) & (c_B < C)
            x = _input(x_ptr, before_ptr, source, row_stride, c_B, is_new)
            is_old = (source < first) & has_past & (c_B < C)
            old = tl.load(window_ptrs + (w + num_rows) * C, mask=is_old, other=0.0)
            kept = tl.where(is_new, x.to(tl.float32), old.to(tl.float32))
            tl.store(window_ptrs + w * C, kept.to(state_ptr.dtype.element_ty), mask=c_B < C)


@triton.jit
def _input(
    x_ptr: tl.tensor, before_ptr: tl.tensor, row: tl.tensor, row_stride: tl.tensor, c_B: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Inputs of rows, a vector or a single one, times the gate before the convolution if there is one."""
    if len(mask.shape) == 2:
        at = row.to(tl.int64)[:, None] * row_stride + c_B[None, :]
    else:
        at = row.to(tl.int64) * row_stride + c_B
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if before_ptr is not None:
        gate = tl.load(before_ptr + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) * gate.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return x


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
    T, (W, C), S = len(x_TC), weight_WC.shape, len(rows.slots_S)
    out_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    if T == 0:
        return out_TC
    is_single, blocks = rows.max_query_len == 1, triton.cdiv(C, CHANNELS)
    # fmt: off
    launch(
        causal_conv_kernel, (triton.cdiv(T, ROWS), blocks), x_TC, before, after, weight_WC, bias_C, state, out_TC,
        rows.cu_seqlens_q, rows.seq_lens_S, rows.slots_S, T, S, x_TC.stride(0), C=C, W=W,
        HAS_SILU=activation is not None, IS_SINGLE=is_single, ROWS=ROWS,
        SEQUENCES=1 if is_single else triton.next_power_of_2(S), CHANNELS=CHANNELS, num_warps=4,
    )
    if not is_single:
        launch(
            move_window_kernel, (S, blocks), x_TC, before, state, rows.cu_seqlens_q, rows.seq_lens_S, rows.slots_S,
            x_TC.stride(0), C=C, W=W, CHANNELS=CHANNELS, num_warps=4,
        )
    # fmt: on
    return out_TC


@causal_conv.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def causal_conv_triton(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """See ``ops.causal_conv``."""
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    return convolve((x_TC, None, None), weight_WC, bias_C, state, rows, activation)


@gated_conv.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gated_conv_triton(
    bcx_T3C: Tensor, weight_WC: Tensor, bias_C: Tensor | None, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.gated_conv``."""
    bcx_T3C = bcx_T3C if bcx_T3C.stride(1) == 1 else bcx_T3C.contiguous()
    b_TC, c_TC, x_TC = bcx_T3C.chunk(3, dim=-1)
    return convolve((x_TC, b_TC, c_TC), weight_WC, bias_C, state, rows, None)
