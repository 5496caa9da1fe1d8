"""The gated delta rule (arXiv 2412.06464), and Kimi Delta Attention, with a decay for each number of a key
(arXiv 2510.26692).

Shapes: T tokens of the step, N value heads, K numbers of a key, V numbers of a value, C = 2 (key heads) K + N V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.recurrent.gated_norm import Gate, gated_norm
from octavo.ops.recurrent.recurrence import StateRows, recur, wide_type

L2_EPS = 1e-6


class DeltaHeads(NamedTuple):
    """Static parameters of a layer's heads."""

    num_key_heads: int
    """Heads of queries and keys; each is used by N / num_key_heads neighbouring value heads."""
    num_heads: int
    key_dim: int
    value_dim: int
    a_log_N: Tensor
    """float32: the natural logarithm of each head's rate of decay."""
    dt_bias: Tensor
    """float32 [N], or [N * K] with a decay for each number of a key."""
    norm_V: Tensor
    """RMSNorm weight of every head's output."""
    norm_eps: float
    gate: Gate = "silu"
    beta_scale: float = 1.0
    """2 allows negative eigenvalues of the state's transition (arXiv 2411.12537)."""
    is_tiled: bool = False
    """Whether outputs are in the order of GGUF files: the first value head of every key head, then the second."""
    lowest: float = 0.0
    """Below zero, decays are ``exp(lowest * sigmoid(exp(a_log) * (dt + dt_bias)))``; they have one for each number of a
    key then."""

    @property
    def sizes(self) -> list[int]:
        """Number of columns of queries, keys and values in a row."""
        keys = self.num_key_heads * self.key_dim
        return [keys, keys, self.num_heads * self.value_dim]


@op
def gated_delta(
    qkv_TC: Tensor, dt: Tensor, beta_TN: Tensor, gate_TM: Tensor, heads: DeltaHeads, state: Tensor, rows: StateRows
) -> Tensor:
    """The heads' outputs, normalised and gated: a new tensor [T, N * V] of qkv's dtype. In float32 at least.

    ``qkv`` holds queries, keys and values after their convolution; ``dt`` has a column for each number of ``dt_bias``,
    ``gate`` is [T, N * V]. With ``q, k`` divided by their L2 norms and ``q`` also by ``sqrt(K)``, for each head::

        decay = exp(-exp(a_log) * softplus(dt + dt_bias))
        S = decay * S + k u^T,  u = beta_scale * sigmoid(beta) * (v - (decay * S)^T k)
        out = norm(S^T q) * norm_weight * act(gate)

    ``state`` is [slots, N, K, V], float32, or of fewer bits. All inputs may be some of the columns of wider tensors.
    """
    T, wide, N = len(qkv_TC), wide_type(qkv_TC), heads.num_heads
    q, k, v = (part.to(wide).view(T, -1, dim) for part, dim in _parts(qkv_TC, heads))
    q, k = (_unit(x).repeat_interleave(N // heads.num_key_heads, dim=1) for x in (q, k))
    rate_N1 = -heads.a_log_N.to(wide).exp().unsqueeze(-1)
    steps_TNK = (dt.to(wide) + heads.dt_bias).view(T, N, -1)
    if heads.lowest:
        decay_TNK = (heads.lowest * torch.sigmoid(-rate_N1 * steps_TNK)).exp()
    else:
        decay_TNK = (rate_N1 * functional.softplus(steps_TNK)).exp()
    beta_TN = heads.beta_scale * beta_TN.to(wide).sigmoid()
    out_TNV = recur(q * heads.key_dim**-0.5, k, v, decay_TNK, state, rows, beta_TN)
    normed_TM: Tensor = gated_norm(
        out_TNV.flatten(1),
        gate_TM,
        heads.norm_V.to(wide).repeat(N),
        heads.norm_eps,
        heads.value_dim,
        heads.gate,
        is_gated_first=False,
    )
    if heads.is_tiled:
        normed_TM = normed_TM.view(T, heads.num_key_heads, -1, heads.value_dim).transpose(1, 2).reshape(T, -1)
    return normed_TM.to(qkv_TC.dtype)


def _parts(qkv_TC: Tensor, heads: DeltaHeads) -> zip[tuple[Tensor, int]]:
    dims = heads.key_dim, heads.key_dim, heads.value_dim
    return zip(qkv_TC.split_with_sizes(heads.sizes, dim=-1), dims, strict=True)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)
