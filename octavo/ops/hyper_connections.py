"""Hyper-connections: several residual streams, and maps of each token that mix them (mHC, arXiv 2512.24880).

Shapes: T tokens, S streams, D model, X = S D, M = S (S + 2) numbers that say how the streams of a token are mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention.attention import MAX_SCRATCH
from octavo.ops.dispatch import op
from octavo.ops.elementwise import sigmoid
from octavo.ops.linear.linear import linear


def in_parts(function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
    """What a function of rows makes of these tensors [T, ...], computed of so many rows at once that ``MAX_SCRATCH``
    numbers hold the widest of them: streams in float32 would take more than the rest of a step."""
    size = max(1, MAX_SCRATCH // max(x.shape[1] for x in given))
    if len(given[0]) <= size:
        return function(*given)
    found = [function(*parts) for parts in zip(*(torch.split(x, size) for x in given), strict=True)]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


class StreamMaps(NamedTuple):
    """What says how streams are mixed before and after a part of a layer. All tensors are float32."""

    weight_MX: Tensor
    """Maps the normalised streams of a token to S numbers for the sum that a part gets, S for what of its result each
    stream gets, and S S for how streams are mixed; in the last step of a model, to the first S alone."""
    base_M: Tensor
    scales: Tensor
    """Factors of each of the three, [3], or of the first alone, [1]."""
    num_streams: int
    iterations: int
    """Of the normalisation of mixed streams (Sinkhorn and Knopp, 1967)."""
    eps: float
    norm_eps: float


class Mixed(NamedTuple):
    """What ``enter_streams`` gives."""

    sum_TD: Tensor
    """The input of the part, of the streams' dtype."""
    post_TS: Tensor
    """float32: how much of its result each stream gets."""
    mix_TSS: Tensor
    """float32: ``mix[t, i, j]`` is how much of stream i goes into stream j; rows and columns have sums near 1."""


@op
def enter_streams(x_TX: Tensor, maps: StreamMaps) -> Mixed:
    """The weighted sum of a token's streams that a part of a layer gets, and how its result is to be added."""
    S, scales = maps.num_streams, maps.scales
    given_TM = _mapped(x_TX, maps)
    pre, post, mix = given_TM.split_with_sizes((S, S, S * S), dim=1)
    base_pre, base_post, base_mix = maps.base_M.split_with_sizes((S, S, S * S))
    mix_TSS = (mix * scales[2] + base_mix).view(-1, S, S).softmax(dim=2) + maps.eps
    mix_TSS = mix_TSS / (mix_TSS.sum(dim=1, keepdim=True) + maps.eps)
    for _ in range(maps.iterations - 1):
        mix_TSS = mix_TSS / (mix_TSS.sum(dim=2, keepdim=True) + maps.eps)
        mix_TSS = mix_TSS / (mix_TSS.sum(dim=1, keepdim=True) + maps.eps)
    post_TS = 2 * sigmoid(post * scales[1] + base_post)
    return Mixed(_sum(x_TX, sigmoid(pre * scales[0] + base_pre) + maps.eps), post_TS, mix_TSS)


@op
def leave_streams(y_TD: Tensor, x_TX: Tensor, post_TS: Tensor, mix_TSS: Tensor) -> Tensor:
    """The next streams: the mixed ones, and the part's result ``y`` as ``enter_streams`` says; a new tensor [T, X] of
    x's dtype. Sums are computed in float32 at least."""
    T, S = post_TS.shape
    wide = torch.promote_types(x_TX.dtype, torch.float32)
    x_TSD = x_TX.to(wide).view(T, S, y_TD.shape[1])
    next_TSD, mix_TSS = post_TS.to(wide).unsqueeze(2) * y_TD.to(wide).unsqueeze(1), mix_TSS.to(wide)
    for i in range(S):  # products and sums of numbers, whose bits do not depend on how many rows there are
        next_TSD += mix_TSS[:, i].unsqueeze(2) * x_TSD[:, i].unsqueeze(1)
    return next_TSD.to(x_TX.dtype).flatten(1)


@op
def last_streams(x_TX: Tensor, maps: StreamMaps) -> Tensor:
    """The weighted sum of a token's streams behind the last layer, a new tensor [T, D]."""
    return _sum(x_TX, sigmoid(_mapped(x_TX, maps) * maps.scales + maps.base_M) + maps.eps)


def _mapped(x_TX: Tensor, maps: StreamMaps) -> Tensor:
    """The map of the normalised streams, float32 at least."""
    x_TX = x_TX.to(torch.promote_types(x_TX.dtype, torch.float32))
    normed_TX = x_TX * torch.rsqrt(x_TX.square().mean(dim=1, keepdim=True) + maps.norm_eps)
    return linear(normed_TX, maps.weight_MX.to(x_TX.dtype))


def _sum(x_TX: Tensor, weights_TS: Tensor) -> Tensor:
    """The sum of streams with these weights, of x's dtype."""
    (T, X), S = x_TX.shape, weights_TS.shape[1]
    x_TSD = x_TX.view(T, S, X // S)
    return (weights_TS.unsqueeze(2) * x_TSD).sum(dim=1).to(x_TX.dtype)


# ---- attend_streams: what a part of a layer gets of earlier streams and the present one, each token for itself.
# Shapes: T tokens, S earlier streams, D model, Q queries.


@op
def attend_streams(x_TSD: Tensor, y_TD: Tensor, queries_QD: Tensor, eps: float) -> Tensor:
    """Each query's attention to the streams ``x`` and, behind them, ``y``, a new tensor of float32 [Q, T, D].

    Keys and values are the streams divided by their root mean squares; scores are products over the root of D. The
    queries are float32; ``x`` may be some columns of wider rows, and have no stream.
    """
    wide = torch.promote_types(queries_QD.dtype, torch.float32)
    streams = [*x_TSD.to(wide).unbind(1), y_TD.to(wide)]
    normed = [x_TD * torch.rsqrt(x_TD.square().mean(dim=1, keepdim=True) + eps) for x_TD in streams]
    found = []
    for query_D in queries_QD / queries_QD.shape[1] ** 0.5:
        scores_TS = torch.cat([(x_TD * query_D).sum(dim=1, keepdim=True) for x_TD in normed], dim=1)
        total_TD = torch.zeros_like(normed[0])
        for x_TD, weight_T1 in zip(normed, scores_TS.softmax(dim=1).unsqueeze(2).unbind(1), strict=True):
            total_TD += weight_T1 * x_TD
        found.append(total_TD)
    return torch.stack(found)
