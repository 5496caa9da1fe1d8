"""Linear maps of dense weights, low-rank updates of them, and columns side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.activation import gelu_and_mul, silu_and_mul
from octavo.ops.dispatch import op
from octavo.ops.norms import rms_norm

# ---- linear: A linear map, with what can be fused with it. Shapes: T tokens, K inputs, N outputs.


Activation = Literal["silu", "gelu", "gelu_tanh"]


class Fused(NamedTuple):
    """What a linear map does besides its product: ``act(rms_norm(x) @ weight.T + bias) + residual``.

    What is ``None`` is left out.
    """

    bias_N: Tensor | None = None
    norm_K: Tensor | None = None
    """The weight of an RMSNorm of x."""
    eps: float = 0.0
    """Of the norm."""
    residual_TN: Tensor | None = None
    """May be overwritten and returned."""
    activation: Activation | None = None
    """Gated: the N outputs are N / 2 gates, then N / 2 ups, and the result is ``act(gate) * up``, [T, N / 2]."""

    def width(self, N: int) -> int:
        """Columns of the result of a map of N outputs."""
        return N if self.activation is None else N // 2


PLAIN = Fused()


@op
def linear(x_TK: Tensor, weight_NK: Tensor, fused: Fused = PLAIN) -> Tensor:
    """``x @ weight.T`` with what is fused, all of one dtype, sums in float32 at least.

    On a CPU the weight may also be of 16 bits with everything else in float32.
    """

    def multiply(normed_TK: Tensor) -> Tensor:
        return functional.linear(normed_TK, weight_NK.to(x_TK.dtype), fused.bias_N)

    return compose(x_TK, fused, multiply)


def compose(x_TK: Tensor, fused: Fused, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply norm, activation and residual around ``multiply``, which adds the bias, one op each; for kernels without
    fusion."""
    _, norm_K, eps, residual_TN, activation = fused
    y_TN = multiply(x_TK if norm_K is None else rms_norm(x_TK, norm_K, eps))
    if activation is not None:
        y_TN = silu_and_mul(y_TN) if activation == "silu" else gelu_and_mul(y_TN, activation == "gelu_tanh")
    return y_TN if residual_TN is None else residual_TN.add_(y_TN)


def check_linear(op: str, x_TK: Tensor, weight_shape: Sequence[int], fused: Fused) -> None:
    """Raise ``ValueError`` when the shapes of a linear map's arguments do not match."""
    (T, K), (N, K_weight) = x_TK.shape, weight_shape
    residual_shape = T, fused.width(N)
    if K_weight != K:
        raise ValueError(f"{op}: x has {K} columns, the weight takes {K_weight}")
    given = ("bias", fused.bias_N, (N,)), ("norm", fused.norm_K, (K,)), ("residual", fused.residual_TN, residual_shape)
    for name, x, shape in given:
        if x is not None and (x.shape != shape or not x.is_contiguous()):
            raise ValueError(f"{op}: {name} must be contiguous, of shape {list(shape)}; it has {list(x.shape)}")


# ---- head_linear: A separate linear map for each head. Shapes: T tokens, N heads, K inputs, O outputs.


@op
def head_linear(x_TNK: Tensor, weight_NOK: Tensor) -> Tensor:
    """``x[:, n] @ weight[n].T`` for each head n, all of one dtype; a new tensor [T, N, O]."""
    return (x_TNK.transpose(0, 1) @ weight_NOK.mT).transpose(0, 1)


# ---- lora: LoRA: low-rank updates of a linear map, one adapter per group of rows (Hu et al., arXiv 2106.09685).
# Shapes: T tokens, K inputs, N outputs of the full map, R rank.


class LowRank(NamedTuple):
    """The update ``up @ down`` of a range of a map's outputs. All of one dtype."""

    start: int
    """First output of the range."""
    down_RK: Tensor
    up_NR: Tensor
    """Scaled; one row per output of the range."""


class RowGroup(NamedTuple):
    """Rows from ``start`` to ``end``, and their updates."""

    start: int
    end: int
    changes: Sequence[LowRank]


@op
def lora(y_TN: Tensor, x_TK: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Add ``x @ down.T @ up.T`` to the outputs of each update; returns ``y``, overwritten.

    Rows of no group are unchanged, and a row's result does not depend on the other rows.
    """
    for first, last, changes in groups:
        for start, down_RK, up_NR in changes:
            y_TN[first:last, start : start + len(up_NR)] += linear(linear(x_TK[first:last], down_RK), up_NR)
    return y_TN


# ---- stacked_lora: LoRA with one adapter per row, where only the device knows which row uses which adapter. The
# adapters of a map are in one stack at a fixed address, so that a captured graph serves any loaded adapters. Shapes:
# T tokens, K inputs, N outputs of the full map, P parts of it, A places for adapters, R highest rank.


NO_ADAPTER = -1
"""Place of a row without an adapter."""


class LowRankStack(NamedTuple):
    """The updates of one map by all adapters; parts without an update, and unused ranks, are 0."""

    down_APRK: Tensor
    up_ANR: Tensor
    """Scaled, and of the same dtype."""
    parts_P2: Tensor
    """int32: first output and number of outputs of each part. Parts do not overlap."""
    widest: int
    """Largest number of outputs of a part."""


@op
def stacked_lora(y_TN: Tensor, x_TK: Tensor, places_T: Tensor, stack: LowRankStack) -> Tensor:
    """Add ``x @ down.T @ up.T``, part by part, of the adapter at each row's place (int32); returns ``y``, overwritten.

    Rows with a negative place are unchanged, and a row's result does not depend on the other rows. All of one dtype;
    ``x @ down.T`` is rounded to it.
    """
    for place in sorted(set(places_T.tolist())):
        if place < 0:
            continue
        rows = (places_T == place).nonzero()[:, 0]
        for part, (start, size) in enumerate(stack.parts_P2.tolist()):
            low_TR = linear(x_TK[rows], stack.down_APRK[place, part])
            y_TN[rows, start : start + size] += linear(low_TR, stack.up_ANR[place, start : start + size])
    return y_TN


# ---- concat: Rows side by side. Shapes: T tokens, M columns of a part, N columns of the result.


@op
def concat(first_TM: Tensor, *others: Tensor) -> Tensor:
    """The columns of all parts, a new tensor [T, N]; all of one dtype."""
    return torch.cat((first_TM, *others), dim=1)


# ---- put_columns: Concatenates the results of several linear maps along columns. Shapes: T tokens, M columns of a
# part, N columns of the result.


@op
def put_columns(part_TM: Tensor, out_TN: Tensor, start: int, bias_N: Tensor | None = None) -> None:
    """Set the columns of ``out`` from ``start`` on to ``part`` plus these columns' bias; all of one dtype."""
    end = start + part_TM.shape[1]
    out_TN[:, start:end] = part_TM if bias_N is None else part_TM + bias_N[start:end]
