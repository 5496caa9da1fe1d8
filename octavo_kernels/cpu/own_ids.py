"""``own_ids`` as a compiled call, so that recorded steps contain it."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.embedding import own_ids
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver
from octavo_kernels.cpu.embedding import supports_ids
from octavo_kernels.cpu.memory import fields, read, view

ARGUMENTS = fields(ids=int, out=int, T=int, first=int, count=int)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        ids, out = view(a.ids, a.T, np.int64), view(a.out, a.T, np.int64)
        for t in range(a.T):
            own = ids[t] - a.first
            out[t] = own if 0 <= own < a.count else 0
        return 0

    return compiled_driver(drive)


@own_ids.kernel(device="cpu", name="numba", preference=10, supports=supports_ids)
def own_ids_numba(token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """See ``ops.own_ids``."""
    ids = token_ids_T.contiguous()
    out_T = torch.empty(len(ids), dtype=torch.int64)
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (ids.data_ptr(), out_T.data_ptr(), len(ids), first, count)
    call(_driver(), arguments)
    return out_T
