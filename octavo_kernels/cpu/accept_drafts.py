"""``accept_drafts``: a short loop over sequences."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.drafting import accept_drafts
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view

ARGUMENTS = fields(tokens=int, ids=int, indices=int, cu_samples=int, out=int, T=int, S=int, R=int)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        tokens, ids = view(a.tokens, a.R, np.int32), view(a.ids, a.T, np.int64)
        indices, starts = view(a.indices, a.R, np.int64), view(a.cu_samples, a.S + 1, np.int32)
        found = view(a.out, a.S, np.int32)
        for s in range(a.S):
            first, count = starts[s], 0
            while first + count + 1 < starts[s + 1] and tokens[first + count] == ids[indices[first + count] + 1]:
                count += 1
            found[s] = count
        return 0

    return compiled_driver(drive)


@accept_drafts.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: missing(FLOAT_FEATURES))
def accept_drafts_numba(tokens_R: Tensor, token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """See ``ops.accept_drafts``."""
    S = len(cu_samples) - 1
    found_S = torch.empty(S, dtype=torch.int32)
    given = [x.contiguous() for x in (tokens_R, token_ids_T, logits_indices_R, cu_samples)]
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (*(x.data_ptr() for x in given), found_S.data_ptr(), len(token_ids_T), S, len(tokens_R))
    call(_driver(), arguments)
    return found_S
