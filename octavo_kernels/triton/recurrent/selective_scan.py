"""``selective_scan`` for CUDA devices in one launch: a program has the states of some channels in registers while all
rows of a sequence pass, so that a row's bits depend on no other row of the step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.selective_scan import ScanChannels, selective_scan
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch
from octavo_kernels.triton.recurrent.rules import load_row, softplus

CHANNELS = 64
"""Of a program."""


@triton.jit
def selective_scan_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, dt_ptr: tl.tensor, dt_stride: tl.tensor, b_ptr: tl.tensor,
    b_stride: tl.tensor, c_ptr: tl.tensor, c_stride: tl.tensor, a_log_ptr: tl.tensor, bias_ptr: tl.tensor,
    d_ptr: tl.tensor, state_ptr: tl.tensor, out_ptr: tl.tensor, starts_ptr: tl.tensor, lengths_ptr: tl.tensor,
    slots_ptr: tl.tensor, K: tl.constexpr, C: tl.constexpr, K_BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All rows of one sequence, for CHANNELS channels."""
    s = tl.program_id(1)
    k_K, c_B = tl.arange(0, K_BLOCK), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_key, is_channel = k_K < K, c_B < C
    is_in = is_key[:, None] & is_channel[None, :]
    within_KB = k_K[:, None] * C + c_B[None, :]
    rate_KB = -tl.exp(tl.load(a_log_ptr + within_KB, mask=is_in, other=0.0))
    bias, d = load_row(bias_ptr + c_B, is_channel, None), load_row(d_ptr + c_B, is_channel, None)
    after_predecessor(PDL)
    first, end, slot = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1), tl.load(slots_ptr + s)
    if (end > first) & (slot >= 0):
        has_past = tl.load(lengths_ptr + s) > end - first
        at_KB = slot.to(tl.int64) * K * C + within_KB
        state_KB = tl.load(state_ptr + at_KB, mask=is_in & has_past, other=0.0).to(tl.float32)
        t = first.to(tl.int64)
        for _ in range(first, end):
            x = load_row(x_ptr + t * x_stride + c_B, is_channel, None)
            step = softplus(load_row(dt_ptr + t * dt_stride + c_B, is_channel, None) + bias)
            b, c = (
                load_row(b_ptr + t * b_stride + k_K, is_key, None),
                load_row(c_ptr + t * c_stride + k_K, is_key, None),
            )
            state_KB = state_KB * tl.exp(rate_KB * step[None, :]) + b[:, None] * (step * x)[None, :]
            out = tl.sum(state_KB * c[:, None], 0) + d * x
            tl.store(out_ptr + t * C + c_B, out.to(out_ptr.dtype.element_ty), mask=is_channel)
            t += 1
        tl.store(state_ptr + at_KB, state_KB.to(state_ptr.dtype.element_ty), mask=is_in)


@selective_scan.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def selective_scan_triton(
    x_TC: Tensor, dt_TC: Tensor, b_TK: Tensor, c_TK: Tensor, channels: ScanChannels, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.selective_scan``."""
    (K, C), S = channels.a_log_KC.shape, len(rows.slots_S)
    inputs = [x if x.stride(1) == 1 else x.contiguous() for x in (x_TC, dt_TC, b_TK, c_TK)]
    out = torch.empty((len(x_TC), C), dtype=x_TC.dtype, device=x_TC.device)
    if len(out) == 0 or S == 0:
        return out
    # fmt: off
    launch(
        selective_scan_kernel, (triton.cdiv(C, CHANNELS), S), *(part for x in inputs for part in (x, x.stride(0))),
        *channels, state, out, rows.cu_seqlens_q, rows.seq_lens_S, rows.slots_S, K=K, C=C,
        K_BLOCK=triton.next_power_of_2(K), CHANNELS=CHANNELS, num_warps=2,
    )
    # fmt: on
    return out
