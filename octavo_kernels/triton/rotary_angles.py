"""``rotary_angles``: a program for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention import axis_angles, rotary_angles
from octavo_kernels.triton.launch import after_predecessor, launch


@rotary_angles.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def rotary_angles_triton(positions_T: Tensor, frequencies_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See ``ops.rotary_angles``."""
    T, R = len(positions_T), len(frequencies_R)
    cos_TR, sin_TR = (torch.empty(T, R, dtype=torch.float32, device=positions_T.device) for _ in range(2))
    BLOCK = triton.next_power_of_2(R)
    launch(_angles_kernel, (T,), positions_T, frequencies_R, cos_TR, sin_TR, factor, R=R, BLOCK=BLOCK, num_warps=1)
    return cos_TR, sin_TR


@triton.jit
def _angles_kernel(
    positions: tl.tensor,
    frequencies: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    factor: tl.tensor,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    frequency = tl.load(frequencies + pair, mask=pair < R, other=0.0)
    after_predecessor(PDL)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    tl.store(cos + row * R + pair, tl.cos(angle) * factor, mask=pair < R)
    tl.store(sin + row * R + pair, tl.sin(angle) * factor, mask=pair < R)


@axis_angles.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def axis_angles_triton(
    positions_T: Tensor, shifts_AT: Tensor, axes_R: Tensor, frequencies_R: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """See ``ops.axis_angles``."""
    T, R = len(positions_T), len(frequencies_R)
    cos_TR, sin_TR = (torch.empty(T, R, dtype=torch.float32, device=positions_T.device) for _ in range(2))
    tensors = positions_T, shifts_AT.contiguous(), axes_R, frequencies_R, cos_TR, sin_TR
    BLOCK = triton.next_power_of_2(R)
    launch(_axis_kernel, (T,), *tensors, factor, T, R=R, BLOCK=BLOCK, num_warps=1)
    return cos_TR, sin_TR


@triton.jit
def _axis_kernel(
    positions: tl.tensor,
    shifts: tl.tensor,
    axes: tl.tensor,
    frequencies: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    factor: tl.tensor,
    T: tl.tensor,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    frequency = tl.load(frequencies + pair, mask=pair < R, other=0.0)
    axis = tl.load(axes + pair, mask=pair < R, other=0)
    after_predecessor(PDL)
    position = tl.load(positions + row) + tl.load(shifts + axis * T + row, mask=pair < R, other=0)
    angle = position.to(tl.float32) * frequency
    tl.store(cos + row * R + pair, tl.cos(angle) * factor, mask=pair < R)
    tl.store(sin + row * R + pair, tl.sin(angle) * factor, mask=pair < R)
