"""What the recurrent and the chunked kernels share: the rules, and what one row has of them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.recurrent.gated_delta import L2_EPS
from octavo_kernels.triton.recurrent.gated_norm import gate_factor

DELTA, DELTA_BY_CHANNEL, STATE_SPACE, LINEAR = range(4)
EPS = tl.constexpr(L2_EPS)


class Inputs(NamedTuple):
    """Of a recurrence, with N heads of K numbers of a key and V of a value."""

    rule: int
    parts: tuple[Tensor, Tensor, Tensor]
    """Queries, keys and values: columns of one tensor."""
    share: int
    """Neighbouring heads that have one query and key."""
    factor: Tensor
    """Weight of the output's norm [V] of the delta rules; d [N] of STATE_SPACE; each head's decay [N] of LINEAR."""
    dt: Tensor | None = None
    beta: Tensor | None = None
    gate: Tensor | None = None
    a_log: Tensor | None = None
    bias: Tensor | None = None
    activation: str | None = None
    """Of queries, keys and values."""
    gate_kind: str = "silu"
    eps: float = 0.0
    beta_scale: float = 1.0
    lowest: float = 0.0
    """See ``DeltaHeads.lowest``."""
    limits: tuple[float, float] = (0.0, float("inf"))
    """Of time steps, of STATE_SPACE."""
    tile: int = 1
    """Neighbouring heads whose outputs are N / tile heads apart."""

    def strides(self) -> list[int]:
        """Between rows of dt, beta and gate."""
        return [0 if x is None else x.stride(0) for x in (self.dt, self.beta, self.gate)]


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """``log(1 + e^x)`` in float32, also where e^x is small beside 1 (Kahan's way to log(1 + y))."""
    y = tl.exp(-tl.abs(x))
    sum_ = 1.0 + y
    log = tl.where(sum_ == 1.0, y, tl.log(sum_) * (y / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def load_row(ptrs: tl.tensor, mask: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Numbers in float32, through the activation."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    return x


@triton.jit
def channel_exponents(x: tl.tensor, rate: tl.tensor, LOWEST: tl.constexpr) -> tl.tensor:
    """The exponents of decays of numbers of a key; see ``DeltaHeads.lowest``."""
    return LOWEST * tl.sigmoid(-rate * x) if LOWEST < 0.0 else rate * softplus(x)


@triton.jit
def step_and_exponent(
    dt_ptr: tl.tensor, bias: tl.tensor, rate: tl.tensor, n: tl.tensor, k_K: tl.tensor, is_key: tl.tensor,
    low: tl.tensor, high: tl.tensor, RULE: tl.constexpr, K: tl.constexpr, LOWEST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """A head's time step, and the exponent of its decay, or that of each number of its key."""
    if RULE == 1:
        step = load_row(dt_ptr + n * K + k_K, is_key, None) + bias
        exponent = channel_exponents(step, rate, LOWEST)
    else:
        step = softplus(tl.load(dt_ptr + n).to(tl.float32) + bias)
        if RULE == 2:
            step = tl.minimum(tl.maximum(step, low), high)
        exponent = rate * step
    return step, exponent


@triton.jit
def rate_and_bias(
    a_log_ptr: tl.tensor, bias_ptr: tl.tensor, n: tl.tensor, k_K: tl.tensor, is_key: tl.tensor, RULE: tl.constexpr,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Of a head's decay, where it depends on the row."""
    rate = -tl.exp(tl.load(a_log_ptr + n))
    bias = load_row(bias_ptr + n * K + k_K, is_key, None) if RULE == 1 else tl.load(bias_ptr + n)
    return rate, bias


@triton.jit
def decay_of(exponent: tl.tensor, RULE: tl.constexpr) -> tl.tensor:
    """Factors of the rows of a state."""
    decay = tl.exp(exponent)
    if RULE == 1:
        decay = decay[:, None]
    return decay


@triton.jit
def normed(
    out: tl.tensor, gate: tl.tensor, norm: tl.tensor, eps: tl.tensor, V: tl.constexpr, GATE: tl.constexpr
) -> tl.tensor:
    """Outputs of a head, along the last axis, normalised and gated."""
    scale = tl.rsqrt(tl.sum(out * out, len(out.shape) - 1, keep_dims=True) / V + eps)
    return out * scale * norm * gate_factor(gate, GATE)
