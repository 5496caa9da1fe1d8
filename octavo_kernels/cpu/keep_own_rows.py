"""``keep_own_rows`` as a compiled call, so that recorded steps contain it."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.embedding import keep_own_rows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view

ARGUMENTS = fields(x=int, ids=int, T=int, first=int, count=int, row_bytes=int)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        ids = view(a.ids, a.T, np.int64)
        for t in range(a.T):
            if not a.first <= ids[t] < a.first + a.count:
                view(a.x + t * a.row_bytes, a.row_bytes, np.uint8)[:] = 0
        return 0

    return compiled_driver(drive)


def _supports(dtype: torch.dtype) -> str | None:
    return missing(FLOAT_FEATURES)


@keep_own_rows.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def keep_own_rows_numba(x_TD: Tensor, token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """See ``ops.keep_own_rows``."""
    assert x_TD.is_contiguous(), "rows are overwritten in place"
    ids = token_ids_T.contiguous()
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (x_TD.data_ptr(), ids.data_ptr(), len(ids), first, count, x_TD.shape[1] * x_TD.itemsize)
    call(_driver(), arguments)
    return x_TD
