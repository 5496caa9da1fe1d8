"""``next_tokens``: one loop over the rows of each sequence."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.stepping import NextTokens, next_tokens
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.tensors import address

ARGUMENTS = fields(
    ids=int,
    cu_seqlens=int,
    cu_samples=int,
    accepted=int,
    tokens=int,
    given=int,
    behind=int,
    last_rows=int,
    last_samples=int,
    T=int,
    S=int,
    R=int,
    vocab_size=int,
)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        ids, starts = view(a.ids, a.T, np.int64), view(a.cu_seqlens, a.S + 1, np.int32)
        tokens, given = view(a.tokens, a.R, np.int32), view(a.given, a.S, np.int32)
        samples, accepted = view(a.cu_samples, a.S + 1, np.int32), view(a.accepted, a.S, np.int32)
        behind = view(a.behind, a.T, np.int64)
        last_rows, last_samples = view(a.last_rows, a.S, np.int64), view(a.last_samples, a.S, np.int64)
        for s in range(a.S):
            end, first, num_samples = starts[s + 1], s, 1
            if a.cu_samples:
                first, num_samples = samples[s], samples[s + 1] - samples[s]
            for row in range(starts[s], end):
                nth = row - (end - num_samples)
                if nth < 0:
                    behind[row] = ids[row + 1]
                elif given[s] >= 0:
                    behind[row] = given[s]
                else:
                    token = np.int64(tokens[min(max(first + nth, 0), a.R - 1)])
                    behind[row] = min(max(token, 0), a.vocab_size - 1)
            rejected = max(num_samples - 1 - accepted[s], 0) if a.accepted else 0
            last_rows[s] = max(end - 1 - rejected, 0)
            last_samples[s] = min(max(first + num_samples - 1 - rejected, 0), a.R - 1)
        behind[starts[a.S] :] = 0
        return 0

    return compiled_driver(drive)


@next_tokens.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: missing(FLOAT_FEATURES))
def next_tokens_numba(
    token_ids_T: Tensor,
    cu_seqlens_q: Tensor,
    cu_samples: Tensor | None,
    num_accepted_S: Tensor | None,
    tokens_R: Tensor,
    given_S: Tensor,
    vocab_size: int,
) -> NextTokens:
    """See ``ops.next_tokens``."""
    T, S, R = len(token_ids_T), len(given_S), len(tokens_R)
    given = token_ids_T, cu_seqlens_q, cu_samples, num_accepted_S, tokens_R, given_S
    dense = [None if x is None else x.contiguous() for x in given]
    found = NextTokens(*(torch.empty(size, dtype=torch.int64) for size in (T, S, S)))
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (*map(address, dense), *map(address, found), T, S, R, vocab_size)
    call(_driver(), arguments)
    return found
