"""Speculative decoding: which drafts are accepted, and the rows of a drafter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops.drafting import DraftRows, accept_drafts, draft_rows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, rarely_used
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view

# ---- accept_drafts: ``accept_drafts``: a short loop over sequences.


ACCEPT_DRAFTS_ARGUMENTS = fields("tokens ids indices cu_samples out T S R")


@rarely_used
@driver
def _accept_drafts_driver(pool: int, arguments: int) -> int:
    a = read(arguments, ACCEPT_DRAFTS_ARGUMENTS)
    tokens, ids = view(a.tokens, a.R, np.int32), view(a.ids, a.T, np.int64)
    indices, starts = view(a.indices, a.R, np.int64), view(a.cu_samples, a.S + 1, np.int32)
    found = view(a.out, a.S, np.int32)
    for s in range(a.S):
        first, count = starts[s], 0
        while first + count + 1 < starts[s + 1] and tokens[first + count] == ids[indices[first + count] + 1]:
            count += 1
        found[s] = count
    return 0


@accept_drafts.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: missing(FLOAT_FEATURES))
def accept_drafts_numba(tokens_R: Tensor, token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """See ``ops.accept_drafts``."""
    S = len(cu_samples) - 1
    found_S = torch.empty(S, dtype=torch.int32)
    given = [x.contiguous() for x in (tokens_R, token_ids_T, logits_indices_R, cu_samples)]
    values = (*(x.data_ptr() for x in given), found_S.data_ptr(), len(token_ids_T), S, len(tokens_R))
    call(_accept_drafts_driver(), ACCEPT_DRAFTS_ARGUMENTS, values)
    return found_S


# ---- draft_rows: ``draft_rows``: one loop over sequences and passes.


DRAFT_ROWS_ARGUMENTS = fields(
    "positions last_rows capacities tables out_positions out_slots out_lengths out_starts T S P G B group_stride "
    "row_stride block_size"
)


@rarely_used
@driver
def _draft_rows_driver(pool: int, arguments: int) -> int:
    a = read(arguments, DRAFT_ROWS_ARGUMENTS)
    positions, last_rows = view(a.positions, a.T, np.int64), view(a.last_rows, a.S, np.int64)
    capacities, starts = view(a.capacities, a.S, np.int32), view(a.out_starts, a.S + 1, np.int32)
    out_positions = view(a.out_positions, a.P * a.S, np.int64)
    out_slots, out_lengths = view(a.out_slots, a.G * a.P * a.S, np.int64), view(a.out_lengths, a.P * a.S, np.int32)
    starts[0] = 0
    for s in range(a.S):
        starts[s + 1] = starts[s] + (capacities[s] > 0)
        for p in range(a.P):
            position, at = positions[last_rows[s]] + 1 + p, p * a.S + s
            out_positions[at] = position
            out_lengths[at] = min(position + 1, np.int64(capacities[s]))
            for g in range(a.G):
                slot = np.int64(-1)
                if position < capacities[s]:
                    table = view(a.tables + 4 * (g * a.group_stride + s * a.row_stride), a.B, np.int32)
                    block = np.int64(table[min(position // a.block_size, a.B - 1)])
                    slot = block * a.block_size + position % a.block_size
                out_slots[g * a.P * a.S + at] = slot
    return 0


@draft_rows.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: missing(FLOAT_FEATURES))
def draft_rows_numba(
    positions_T: Tensor,
    last_rows_S: Tensor,
    capacities_S: Tensor,
    block_tables_GSB: Tensor,
    num_passes: int,
    block_size: int,
) -> DraftRows:
    """See ``ops.draft_rows``."""
    P, (G, S, B) = num_passes, block_tables_GSB.shape
    assert block_tables_GSB.stride(2) == 1 or B == 1, "the entries of a block table must lie side by side"
    given = positions_T.contiguous(), last_rows_S.contiguous(), capacities_S.contiguous(), block_tables_GSB
    found = DraftRows(
        torch.empty(P, S, dtype=torch.int64),
        torch.empty(G, P, S, dtype=torch.int64),
        torch.empty(P, S, dtype=torch.int32),
        torch.empty(S + 1, dtype=torch.int32),
    )
    strides = block_tables_GSB.stride()[:2]
    addresses = (x.data_ptr() for x in (*given, *found))
    call(_draft_rows_driver(), DRAFT_ROWS_ARGUMENTS, (*addresses, len(positions_T), S, P, G, B, *strides, block_size))
    return found
