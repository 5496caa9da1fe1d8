"""What happens to a layer's queries, keys and values before ``attention``, beyond its norms and rotation; and gates.

Each step takes a row's queries, keys and values side by side, which it may overwrite, and the angles of the step; it
returns both for the next one. Angles of ``None`` say that queries and keys are rotated already, or never are.

Shapes: T tokens, N heads, K kv heads, H head dim, V value dim, W = (N + 2 K) H, R rotated pairs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from octavo import ops
from octavo.layers.norm import RMSNorm
from octavo.ops.attention.attention import HeadLayout
from octavo.ops.attention.choose_keys import ChosenKeys
from octavo.ops.elementwise import softplus

Angles = tuple[Tensor, Tensor] | tuple[None, None]
UNROTATED: Angles = (None, None)


class IndexerChoice:
    """What the indexer of a layer chose, for the layers behind it that have none; ``None``: all positions."""

    keys: ChosenKeys | None = None


class StepAngles(NamedTuple):
    """What depends on positions alone, computed once for all layers of a step."""

    angles: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines of each rotary embedding of the model."""
    query_scale_T1: Tensor | None = None
    """Factor of each row's queries, in layers that ask for it."""
    per_layer_TLP: Tensor | None = None
    """Embeddings of the tokens for each layer, of models that have them."""
    embedded_TD: Tensor | None = None
    """The residual stream before the first layer, of models whose layers see it."""
    choice: IndexerChoice | None = None
    """Of models with indexers."""
    token_ids_T: Tensor | None = None
    """The tokens, of models whose layers see them."""

    def of(self, rope: int | None) -> Angles:
        """The angles of a rotary embedding; of none without one."""
        return UNROTATED if rope is None else self.angles[rope]


class Preparation(Protocol):
    """One step before attention; see the module's docstring."""

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]: ...


class ClippedHeads:
    """Limits all numbers to an absolute value."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]:
        return qkv_TW.clamp_(-self.limit, self.limit), angles


class JointNorms:
    """An RMSNorm over all query heads of a token together, and one over all key heads."""

    def __init__(self, queries: RMSNorm, keys: RMSNorm, heads: HeadLayout) -> None:
        self.queries, self.keys, self.heads = queries, keys, heads

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]:
        q_TW, k_TW, v_TW = qkv_TW.split_with_sizes(self.heads.sizes, dim=-1)
        return ops.concat(self.queries(q_TW), self.keys(k_TW), v_TW), angles


class OwnNorms:
    """A LayerNorm of each head, with a weight of its own and without bias."""

    def __init__(self, queries_NH: Tensor, keys_KH: Tensor, eps: float, heads: HeadLayout) -> None:
        self.weights, self.eps, self.heads = (queries_NH, keys_KH), eps, heads

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]:
        parts = list(qkv_TW.split_with_sizes(self.heads.sizes, dim=-1))
        for i, weight_NH in enumerate(self.weights):
            x_TNH = parts[i].reshape(len(qkv_TW), *weight_NH.shape).float()
            normed_TNH = functional.layer_norm(x_TNH, x_TNH.shape[-1:], eps=self.eps) * weight_NH.float()
            parts[i] = normed_TNH.flatten(1).to(qkv_TW.dtype)
        return ops.concat(*parts), angles


class LateNorms:
    """Rotates queries and keys, then normalises each head."""

    def __init__(self, queries: RMSNorm, keys: RMSNorm, heads: HeadLayout) -> None:
        self.queries, self.keys, self.heads = queries, keys, heads

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]:
        H = self.heads.head_dim
        q_TW, k_TW, v_TW = qkv_TW.split_with_sizes(self.heads.sizes, dim=-1)
        q_TNH, k_TKH = (part.reshape(len(part), -1, H) for part in (q_TW, k_TW))
        cos_TR, sin_TR = angles
        if cos_TR is not None and sin_TR is not None:
            q_TNH, k_TKH = ops.apply_rope(q_TNH, k_TKH, cos_TR, sin_TR)
        q_TW = self.queries(q_TNH.reshape(-1, H)).reshape(q_TW.shape)
        k_TW = self.keys(k_TKH.reshape(-1, H)).reshape(k_TW.shape)
        return ops.concat(q_TW, k_TW, v_TW), UNROTATED


class ScaledQueries:
    """Multiplies a row's queries by the factor of its position."""

    def __init__(self, heads: HeadLayout) -> None:
        self.heads = heads

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]:
        assert step.query_scale_T1 is not None
        qkv_TW[:, : self.heads.sizes[0]].mul_(step.query_scale_T1)
        return qkv_TW, angles


class WideValues:
    """Fills value heads of V numbers, scaled, with zeros to the width of a key head, for attention of one width."""

    def __init__(self, heads: HeadLayout, value_dim: int, scale: float) -> None:
        self.heads, self.value_dim, self.scale = heads, value_dim, scale

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]:
        (q, k, v), T = self.heads.sizes, len(qkv_TW)
        wide_TW = qkv_TW.new_zeros(T, q + k + v)
        wide_TW[:, : q + k] = qkv_TW[:, : q + k]
        values_TKV = qkv_TW[:, q + k :].reshape(T, -1, self.value_dim)
        wide_TW[:, q + k :].view(T, -1, self.heads.head_dim)[..., : self.value_dim] = values_TKV * self.scale
        return wide_TW, angles

    def narrow(self, attended_TN: Tensor) -> Tensor:
        """The outputs [T, N V] in attention's result [T, N H]."""
        wide_TNH = attended_TN.view(len(attended_TN), -1, self.heads.head_dim)
        return wide_TNH[..., : self.value_dim].reshape(len(attended_TN), -1)


def gated(gates_TG: Tensor, attended_TN: Tensor, function: Literal["sigmoid", "softplus"]) -> Tensor:
    """Attention's outputs times a function of the gates of each number, or of each head; a new tensor [T, N]."""
    if gates_TG.shape[1] < attended_TN.shape[1]:
        gates_TG = gates_TG.repeat_interleave(attended_TN.shape[1] // gates_TG.shape[1], dim=1)
    if function == "sigmoid":
        return ops.sigmoid_and_mul(gates_TG, attended_TN)
    return attended_TN * softplus(gates_TG.float()).to(attended_TN.dtype)


def query_scale(positions_T: Tensor, beta: float, period: int, offset: int = 0) -> Tensor:
    """``1 + beta ln(1 + floor((position + offset) / period))`` in float32 [T, 1], for queries of long contexts."""
    turns_T = torch.floor((positions_T + offset).float() / period)
    return (1 + beta * torch.log1p(turns_T)).unsqueeze(1)
