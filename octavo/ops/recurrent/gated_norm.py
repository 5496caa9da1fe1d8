"""Root-mean-square normalisation with a gate, over groups of columns.

Shapes: T tokens, C columns, of which W form a group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.recurrent.recurrence import wide_type

Gate = Literal["silu", "sigmoid"]


@op
def gated_norm(
    x_TC: Tensor, gate_TC: Tensor, weight_C: Tensor, eps: float, width: int, gate: Gate, *, is_gated_first: bool
) -> Tensor:
    """``norm(x) * weight * act(gate)``, or ``norm(x * act(gate)) * weight`` if ``is_gated_first``; of x's dtype.

    Each group of ``width`` columns has a norm of its own. Computed in float32 at least; the gate may be a part of the
    columns of a wider tensor.
    """
    wide = wide_type(x_TC)
    x, gates = x_TC.to(wide), gate_TC.to(wide)
    gates = functional.silu(gates) if gate == "silu" else gates.sigmoid()
    if is_gated_first:
        x = x * gates
    groups = x.reshape(len(x), -1, width)
    normed: Tensor = (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)).flatten(1) * weight_C
    return (normed if is_gated_first else normed * gates).to(x_TC.dtype)
