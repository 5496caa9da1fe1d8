"""Linear attention with a fixed decay for each head: lightning attention (arXiv 2401.04658).

Shapes: T tokens of the step, N heads, H head dim.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.recurrent.recurrence import StateRows, recur, wide_type


@op
def linear_attention(
    qkv_TC: Tensor, decay_N: Tensor, state: Tensor, rows: StateRows, activation: Literal["silu"] | None = None
) -> Tensor:
    """The heads' outputs, a new tensor [T, N * H] of qkv's dtype. In float32 at least.

    A row of ``qkv`` holds N queries, then N keys, then N values, to which the activation is applied. For each head::

        S = decay * S + k v^T
        out = S^T q

    ``decay`` is float32; ``state`` is [slots, N, H, H], float32, or of fewer bits.
    """
    wide = wide_type(qkv_TC)
    qkv = functional.silu(qkv_TC.to(wide)) if activation else qkv_TC.to(wide)
    q, k, v = qkv.reshape(len(qkv), 3, len(decay_N), -1).unbind(dim=1)
    decay_TN1 = decay_N.to(wide).unsqueeze(-1).expand(len(qkv), -1, 1)
    return recur(q, k, v, decay_TN1, state, rows).flatten(1).to(qkv_TC.dtype)
