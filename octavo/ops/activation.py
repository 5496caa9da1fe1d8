"""What a feed-forward layer applies between its linear maps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import elementwise
from octavo.ops.dispatch import op

# ---- gelu: The activation of a feed-forward layer without gates (Hendrycks and Gimpel, arXiv 1606.08415). Shapes: T
# tokens, F ffn.


@op
def gelu(x_TF: Tensor, approximate: bool) -> Tensor:
    """``x * Phi(x)``, or its tanh form with ``approximate``; in float32 at least; a new tensor of x's dtype."""
    wide_TF = x_TF.to(torch.promote_types(x_TF.dtype, torch.float32))
    return elementwise.gelu(wide_TF, approximate).to(x_TF.dtype)


# ---- gelu_and_mul: The gate of a GeGLU feed-forward layer (Shazeer, arXiv 2002.05202). Shapes: T tokens, F ffn.


@op
def gelu_and_mul(gate_up_T2F: Tensor, approximate: bool) -> Tensor:
    """``gelu(gate) * up`` of rows that hold F gates, then F ups; in float32 at least; a new tensor [T, F].

    With ``approximate``, GELU is its tanh form (Hendrycks and Gimpel, arXiv 1606.08415).
    """
    gate_TF, up_TF = gate_up_T2F.to(torch.promote_types(gate_up_T2F.dtype, torch.float32)).chunk(2, dim=-1)
    return (gelu(gate_TF, approximate) * up_TF).to(gate_up_T2F.dtype)


# ---- silu_and_mul: The gate of a SwiGLU feed-forward layer (Shazeer, arXiv 2002.05202). Shapes: T tokens, F ffn.


@op
def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold F gates, then F ups; in float32 at least; a new tensor [T, F]."""
    gate_TF, up_TF = gate_up_T2F.to(torch.promote_types(gate_up_T2F.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)


# ---- sigmoid_and_mul: The output gate of attention. Shapes: T tokens, N columns.


@op
def sigmoid_and_mul(gate_TN: Tensor, x_TN: Tensor) -> Tensor:
    """``sigmoid(gate) * x``, in float32 at least; a new tensor of x's dtype.

    The gate may be some of the columns of a wider tensor.
    """
    wide = torch.promote_types(x_TN.dtype, torch.float32)
    return (elementwise.sigmoid(gate_TN.to(wide)) * x_TN.to(wide)).to(x_TN.dtype)


# ---- add_scaled: What is added to a residual stream. Shapes: T tokens, N columns.


@op
def add_scaled(x_TN: Tensor, factor: float | Tensor, residual_TN: Tensor) -> Tensor:
    """``residual + factor * x``, or with gates [T, 1], as those of shared experts, ``residual + sigmoid(factor) * x``;
    x and the residual may be overwritten."""
    if isinstance(factor, Tensor):
        return residual_TN.add_(x_TN.mul_(elementwise.sigmoid(factor)))
    return residual_TN.add_(x_TN, alpha=factor)


# ---- squared_relu: The activation of experts without gates (arXiv 2109.08668). Shapes: T tokens, F ffn.


@op
def squared_relu(x_TF: Tensor) -> Tensor:
    """``max(x, 0)`` squared; x may be overwritten."""
    return x_TF.relu_().square_()


# ---- clamped_swish: The gate of gpt-oss. Shapes: T tokens, F ffn.


@op
def clamped_swish(gate_up_T2F: Tensor, alpha: float, limit: float) -> Tensor:
    """``min(gate, limit) * sigmoid(alpha * gate) * (up + 1)`` of rows that hold F gates, then F ups, gates of at most
    ``limit`` and ups within ``limit`` of zero; in float32 at least; a new tensor [T, F]."""
    gate, up = gate_up_T2F.to(torch.promote_types(gate_up_T2F.dtype, torch.float32)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * elementwise.sigmoid(alpha * gate) * (up + 1)).to(gate_up_T2F.dtype)


# ---- scaled: Factors of a model, such as that of its embeddings. Shapes: T tokens, N columns.


@op
def scaled(x_TN: Tensor, factor: float | Tensor, addend_TN: Tensor | None = None) -> Tensor:
    """``factor * x + addend``, in float32 at least; a new tensor of x's dtype. The factor may be float32 [N].

    ``x`` may be some of the columns of a wider tensor.
    """
    wide = torch.promote_types(x_TN.dtype, torch.float32)
    product = x_TN.to(wide) * factor
    return (product if addend_TN is None else product + addend_TN.to(wide)).to(x_TN.dtype)


# ---- softcap: A smooth limit of logits (Gemma 2, arXiv 2408.00118). Shapes: R rows, V vocabulary.


@op
def softcap(logits_RV: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)``; overwrites and returns the logits."""
    return logits_RV.div_(cap).tanh_().mul_(cap)
