"""``head_linear`` for the CPU: the kernel of ``linear`` for each head, in which rows do not depend on each other."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.linear.linear import head_linear
from octavo_kernels.cpu.linear.linear import linear_numba
from octavo_kernels.cpu.tensors import declines_floats


@head_linear.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def head_linear_numba(x_TNK: Tensor, weight_NOK: Tensor) -> Tensor:
    """See ``ops.head_linear``."""
    return torch.stack([linear_numba(x_TNK[:, n], weight_OK) for n, weight_OK in enumerate(weight_NOK)], 1)
