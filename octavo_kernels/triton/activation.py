"""What a feed-forward layer applies between its linear maps."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.activation import add_scaled, gelu, gelu_and_mul, sigmoid_and_mul, silu_and_mul
from octavo.ops.moe import CappedSwish, ClampedSwish, ExpertActivation, SoftcappedSwish, SquaredReLU
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

# ---- gates: The gates of gated activations, for kernels that hold a gate and an up.


BLOCK = 1024


def activation_of(activation: ExpertActivation | None) -> dict[str, Any]:
    """Constants of kernels for an activation, with a gate or without, or for none."""
    if isinstance(activation, ClampedSwish):
        return {"ACTIVATION": "clamped_swish", "ALPHA": activation.alpha, "LIMIT": activation.limit}
    if isinstance(activation, CappedSwish):
        cap = activation.limit if activation.cap is None else activation.cap
        return {"ACTIVATION": "capped_swish", "ALPHA": cap, "LIMIT": activation.limit}
    if isinstance(activation, SoftcappedSwish):
        return {"ACTIVATION": "softcapped_swish", "ALPHA": activation.gate_cap, "LIMIT": activation.up_cap}
    name = "squared_relu" if isinstance(activation, SquaredReLU) else activation
    return {"ACTIVATION": name, "ALPHA": 0.0, "LIMIT": 0.0}


@triton.jit
def gated(
    gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr = 0.0, LIMIT: tl.constexpr = 0.0
) -> tl.tensor:
    """``act(gate) * up`` in float32; ACTIVATION is "silu", "gelu", "gelu_tanh", "clamped_swish" (``ClampedSwish``),
    "capped_swish" (``CappedSwish``) or "softcapped_swish" (``SoftcappedSwish``)."""
    SOFTLY: tl.constexpr = ACTIVATION == "softcapped_swish"
    CLAMPS: tl.constexpr = ACTIVATION == "clamped_swish" or ACTIVATION == "capped_swish"
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh" or CLAMPS or SOFTLY)
    if CLAMPS:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))  # NaN stays NaN
    if ACTIVATION == "clamped_swish":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = up + 1.0
        share = tl.sigmoid(ALPHA * gate)
    elif ACTIVATION == "capped_swish":
        gate = gate * tl.sigmoid(gate)
        gate = tl.where(gate > ALPHA, ALPHA, gate)
        share = 1.0
    elif SOFTLY:
        share = tl.sigmoid(gate)
        gate = ALPHA * (2.0 * tl.sigmoid(2.0 / ALPHA * gate) - 1.0)
        up = LIMIT * (2.0 * tl.sigmoid(2.0 / LIMIT * up) - 1.0)
    elif ACTIVATION == "silu":
        share = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:  # (1 + tanh(z)) / 2 is sigmoid(2 z); here 2 z = sqrt(8 / pi) (gate + 0.044715 gate^3)
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * share * up


@triton.jit
def squared_relu(x: tl.tensor) -> tl.tensor:
    """In float32; NaN stays NaN."""
    return tl.where(x < 0.0, 0.0, x * x)


@triton.jit
def gate_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, F: tl.tensor, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """One block of one row."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    gate = tl.load(x_ptr + t * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + t * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * F + f, gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty), mask=f < F)


def gate_and_mul(gate_up_T2F: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of rows of F gates, then F ups, as a new tensor [T, F]."""
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(T, F, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if T:
        launch(gate_kernel, (T, triton.cdiv(F, BLOCK)), gate_up_T2F.contiguous(), out_TF, F, activation, BLOCK)
    return out_TF


# ---- gelu: ``gelu`` for CUDA devices, in one pass.


@triton.jit
def gelu_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One block of numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, gated(x, 1.0, ACTIVATION).to(out_ptr.dtype.element_ty), mask=i < size)


@gelu.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gelu_triton(x_TF: Tensor, approximate: bool) -> Tensor:
    """See ``ops.gelu``."""
    x, out = x_TF.contiguous(), torch.empty_like(x_TF, memory_format=torch.contiguous_format)
    if x.numel():
        activation = "gelu_tanh" if approximate else "gelu"
        launch(gelu_kernel, (triton.cdiv(x.numel(), BLOCK),), x, out, x.numel(), activation, BLOCK)
    return out


# ---- gelu_and_mul: ``gelu_and_mul`` for CUDA devices.


@gelu_and_mul.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gelu_and_mul_triton(gate_up_T2F: Tensor, approximate: bool) -> Tensor:
    """See ``ops.gelu_and_mul``."""
    return gate_and_mul(gate_up_T2F, "gelu_tanh" if approximate else "gelu")


# ---- silu_and_mul: ``silu_and_mul`` for CUDA devices.


@silu_and_mul.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def silu_and_mul_triton(gate_up_T2F: Tensor) -> Tensor:
    """See ``ops.silu_and_mul``."""
    return gate_and_mul(gate_up_T2F, "silu")


# ---- sigmoid_and_mul, add_scaled: products with sigmoids, of each number or of each row.


@triton.jit
def sigmoid_kernel(
    gate_ptr: tl.tensor, gate_stride: tl.tensor, x_ptr: tl.tensor, addend_ptr: tl.tensor, out_ptr: tl.tensor,
    N: tl.tensor, OF_ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One block of one row: ``sigmoid(gate) * x``, plus an addend if there is one."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    gate = tl.load(gate_ptr + t * gate_stride + (n * 0 if OF_ROW else n), mask=n < N, other=0.0).to(tl.float32)
    y = tl.sigmoid(gate) * tl.load(x_ptr + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    if addend_ptr is not None:
        y += tl.load(addend_ptr + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@sigmoid_and_mul.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def sigmoid_and_mul_triton(gate_TN: Tensor, x_TN: Tensor) -> Tensor:
    """See ``ops.sigmoid_and_mul``."""
    return _gated(gate_TN, x_TN, None)


@add_scaled.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def add_scaled_triton(x_TN: Tensor, factor: float | Tensor, residual_TN: Tensor) -> Tensor:
    """See ``ops.add_scaled``."""
    if not isinstance(factor, Tensor):
        return residual_TN.add_(x_TN, alpha=factor)
    return _gated(factor, x_TN, residual_TN.contiguous())


def _gated(gate: Tensor, x_TN: Tensor, addend_TN: Tensor | None) -> Tensor:
    """``sigmoid(gate) * x + addend`` as a new tensor; the gate is [T, N] or, if there is an addend, [T, 1]."""
    gate, x_TN = gate if gate.stride(1) == 1 else gate.contiguous(), x_TN.contiguous()
    (T, N), out_TN = x_TN.shape, torch.empty_like(x_TN)
    if T:
        grid, is_of_row = (T, triton.cdiv(N, BLOCK)), addend_TN is not None
        launch(sigmoid_kernel, grid, gate, gate.stride(0), x_TN, addend_TN, out_TN, N, is_of_row, BLOCK)
    return out_TN
