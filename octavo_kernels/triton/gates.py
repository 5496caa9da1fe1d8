"""The gates of gated activations, for kernels that hold a gate and an up."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear import Activation
from octavo.ops.moe import ClampedSwish
from octavo_kernels.triton.launch import after_predecessor, launch

BLOCK = 1024


def activation_of(activation: Activation | ClampedSwish | None) -> dict[str, Any]:
    """Constants of ``gated`` for an activation, or for none."""
    if isinstance(activation, ClampedSwish):
        return {"ACTIVATION": "clamped_swish", "ALPHA": activation.alpha, "LIMIT": activation.limit}
    return {"ACTIVATION": activation, "ALPHA": 0.0, "LIMIT": 0.0}


@triton.jit
def gated(
    gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr = 0.0, LIMIT: tl.constexpr = 0.0
) -> tl.tensor:
    """``act(gate) * up`` in float32; ACTIVATION is "silu", "gelu", "gelu_tanh" or, as ``ClampedSwish``,
    "clamped_swish"."""
    tl.static_assert(
        ACTIVATION == "silu" or ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "clamped_swish"
    )
    if ACTIVATION == "clamped_swish":
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        share = tl.sigmoid(ALPHA * gate)
    elif ACTIVATION == "silu":
        share = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:  # (1 + tanh(z)) / 2 is sigmoid(2 z); here 2 z = sqrt(8 / pi) (gate + 0.044715 gate^3)
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * share * up


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
