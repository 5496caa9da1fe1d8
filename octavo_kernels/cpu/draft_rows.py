"""``draft_rows``: one loop over sequences and passes."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.drafting import DraftRows, draft_rows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view

ARGUMENTS = fields(
    positions=int,
    last_rows=int,
    capacities=int,
    tables=int,
    out_positions=int,
    out_slots=int,
    out_lengths=int,
    out_starts=int,
    T=int,
    S=int,
    P=int,
    G=int,
    B=int,
    group_stride=int,
    row_stride=int,
    block_size=int,
)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
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

    return compiled_driver(drive)


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
    arguments = np.empty(1, ARGUMENTS)
    addresses = (x.data_ptr() for x in (*given, *found))
    arguments[0] = (*addresses, len(positions_T), S, P, G, B, *strides, block_size)
    call(_driver(), arguments)
    return found
