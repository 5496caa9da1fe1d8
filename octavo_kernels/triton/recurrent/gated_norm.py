"""``gated_norm`` for CUDA devices: a program takes one group of columns of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.recurrent.gated_norm import Gate, gated_norm
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch


@triton.jit
def gate_factor(gate: tl.tensor, GATE: tl.constexpr) -> tl.tensor:
    """The factor that a gate stands for: "silu" or "sigmoid" of it."""
    share = tl.sigmoid(gate)
    if GATE == "silu":
        share = share * gate
    return share


@triton.jit
def gated_norm_kernel(
    x_ptr: tl.tensor, gate_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, x_stride: tl.tensor,
    gate_stride: tl.tensor, eps: tl.tensor, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GATE: tl.constexpr, IS_GATED_FIRST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = tl.arange(0, BLOCK)
    is_in, c = w < WIDTH, group * WIDTH + w
    weight = tl.load(weight_ptr + c, mask=is_in, other=0.0).to(tl.float32)
    after_predecessor(PDL)
    x = tl.load(x_ptr + t * x_stride + c, mask=is_in, other=0.0).to(tl.float32)
    factor = gate_factor(tl.load(gate_ptr + t * gate_stride + c, mask=is_in, other=0.0).to(tl.float32), GATE)
    if IS_GATED_FIRST:
        x *= factor
    x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
    if not IS_GATED_FIRST:
        x *= factor
    tl.store(out_ptr + t * C + c, x.to(out_ptr.dtype.element_ty), mask=is_in)


@gated_norm.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gated_norm_triton(
    x_TC: Tensor, gate_TC: Tensor, weight_C: Tensor, eps: float, width: int, gate: Gate, *, is_gated_first: bool
) -> Tensor:
    """See ``ops.gated_norm``."""
    x_TC, gate_TC = (x if x.stride(1) == 1 else x.contiguous() for x in (x_TC, gate_TC))
    (T, C), block = x_TC.shape, triton.next_power_of_2(width)
    out_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    if T:
        # fmt: off
        launch(
            gated_norm_kernel, (T, C // width), x_TC, gate_TC, weight_C, out_TC, x_TC.stride(0), gate_TC.stride(0), eps,
            C=C, WIDTH=width, BLOCK=block, GATE=gate, IS_GATED_FIRST=is_gated_first,
            num_warps=min(max(block // 256, 1), 16),
        )
        # fmt: on
    return out_TC
