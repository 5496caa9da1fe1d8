"""The gate of a GeGLU feed-forward layer (Shazeer, arXiv 2002.05202).

Shapes: T tokens, F ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.elementwise import gelu


@op
def gelu_and_mul(gate_up_T2F: Tensor, approximate: bool) -> Tensor:
    """``gelu(gate) * up`` of rows that hold F gates, then F ups; in float32 at least; a new tensor [T, F].

    With ``approximate``, GELU is its tanh form (Hendrycks and Gimpel, arXiv 1606.08415).
    """
    gate_TF, up_TF = gate_up_T2F.to(torch.promote_types(gate_up_T2F.dtype, torch.float32)).chunk(2, dim=-1)
    return (gelu(gate_TF, approximate) * up_TF).to(gate_up_T2F.dtype)
