"""``head_linear`` for CUDA devices: by cuBLAS, or head by head where rows may not depend on the others."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.head_linear import head_linear
from octavo.ops.triton.launch import declines_floats, is_invariant
from octavo.ops.triton.linear import linear_triton


@head_linear.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def head_linear_triton(x_TNK: Tensor, weight_NOK: Tensor) -> Tensor:
    """See ``ops.head_linear``."""
    if not is_invariant():
        return head_linear.reference(x_TNK, weight_NOK)
    return torch.stack([linear_triton(x, weight) for x, weight in zip(x_TNK.unbind(1), weight_NOK, strict=True)], 1)
