"""A linear map with an optional preceding norm, and bias, activation and residual.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.gelu_and_mul import gelu_and_mul
from octavo.ops.rms_norm import rms_norm
from octavo.ops.silu_and_mul import silu_and_mul

Activation = Literal["silu", "gelu", "gelu_tanh"]


@op
def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """``act(rms_norm(x) @ weight.T + bias) + residual``, all of one dtype, sums in float32 at least.

    On a CPU the weight may also be of 16 bits with everything else in float32.
    Arguments that are ``None`` are left out. ``norm_K`` is the weight of an RMSNorm with ``eps``. Activations are
    gated: the N outputs are N / 2 gates, then N / 2 ups, and the result is ``act(gate) * up``, [T, N / 2].
    ``residual`` may be overwritten and returned.
    """

    def multiply(normed_TK: Tensor) -> Tensor:
        return functional.linear(normed_TK, weight_NK.to(x_TK.dtype), bias_N)

    return compose(x_TK, norm_K, eps, residual_TN, activation, multiply)


def compose(
    x_TK: Tensor,
    norm_K: Tensor | None,
    eps: float,
    residual_TN: Tensor | None,
    activation: Activation | None,
    multiply: Callable[[Tensor], Tensor],
) -> Tensor:
    """Apply norm, bias, activation and residual around ``multiply``, one op each; for kernels without fusion."""
    y_TN = multiply(x_TK if norm_K is None else rms_norm(x_TK, norm_K, eps))
    if activation is not None:
        y_TN = silu_and_mul(y_TN) if activation == "silu" else gelu_and_mul(y_TN, activation == "gelu_tanh")
    return y_TN if residual_TN is None else residual_TN.add_(y_TN)
