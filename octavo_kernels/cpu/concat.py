"""``concat`` in float32, as calls that can be recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.linear import concat
from octavo_kernels.cpu.put_columns import declines, put_columns_numba


@concat.kernel(device="cpu", name="numba", preference=10, supports=declines)
def concat_numba(first_TM: Tensor, *others: Tensor) -> Tensor:
    """See ``ops.concat``."""
    parts = (first_TM, *others)
    out_TN = torch.empty(len(first_TM), sum(part.shape[1] for part in parts))
    start = 0
    for part in parts:
        put_columns_numba(part, out_TN, start)
        start += part.shape[1]
    return out_TN
