"""``stage_step``: one loop over sequences."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch import Tensor

from octavo.ops.stepping import LastResults, StagedRows, stage_step
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver, inlined
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.tensors import address

ARGUMENTS = fields(
    ids=int,
    positions=int,
    slots=int,
    sample_positions=int,
    lengths=int,
    cu_seqlens=int,
    cu_samples=int,
    cells=int,
    last_tokens=int,
    last_positions=int,
    drafts=int,
    packed=int,
    T=int,
    S=int,
    R=int,
    C=int,
    K=int,
    G=int,
    width=int,
    block_size=int,
)


@inlined
def _stage_sequence(a: Any, s: int, first_sample: int, num_samples: int) -> None:
    """Tokens, positions and slots of one sequence."""
    starts, ids = view(a.cu_seqlens, a.S + 1, np.int32), view(a.ids, a.T, np.int64)
    positions, cell = view(a.positions, a.T, np.int64), view(a.cells, a.S, np.int64)[s]
    begin, end = starts[s], starts[s + 1]
    known = np.int64(view(a.last_positions, a.C, np.int32)[cell])
    shift = np.int64(0)
    if end > begin and ids[begin] < 0 and known >= 0:
        shift = positions[begin] - known
    for row in range(begin, end):
        nth_draft = row - (end - (num_samples - 1))
        if ids[row] < 0:
            found = view(a.last_tokens, a.C, np.int32)[cell]
            if a.drafts and nth_draft >= 0:
                found = view(a.drafts, a.C * a.K, np.int32)[cell * a.K + min(nth_draft, a.K - 1)]
            ids[row] = max(np.int64(found), 0)
        positions[row] -= shift
        if shift > 0:
            for g in range(a.G):
                table = view(a.packed + 4 * (g * a.S + s) * a.width, a.width, np.int32)
                block = np.int64(table[min(max(positions[row] // a.block_size, 0), a.width - 1)])
                place = block * a.block_size + positions[row] % a.block_size
                view(a.slots + 8 * g * a.T, a.T, np.int64)[row] = place
    view(a.lengths, a.S, np.int32)[s] -= shift
    sample_positions = view(a.sample_positions, a.R, np.int32)
    for sample in range(first_sample, first_sample + num_samples):
        sample_positions[sample] -= shift


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        samples = view(a.cu_samples, a.S + 1, np.int32)
        for s in range(a.S):
            if a.cu_samples:
                _stage_sequence(a, s, np.int64(samples[s]), np.int64(samples[s + 1] - samples[s]))
            else:
                _stage_sequence(a, s, np.int64(s), np.int64(1))
        return 0

    return compiled_driver(drive)


@stage_step.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: missing(FLOAT_FEATURES))
def stage_step_numba(
    token_ids_T: Tensor,
    rows: StagedRows,
    last: LastResults,
    packed_tables: Tensor,
    width: Tensor,
    block_tables_GSB: Tensor,
    block_size: int,
) -> None:
    """See ``ops.stage_step``. All tensors but the block tables must be contiguous."""
    T, S, G, count = len(token_ids_T), len(rows.cells_S), len(block_tables_GSB), int(width)
    tables_GSB = packed_tables[: G * S * count].view(G, S, count)
    if tables_GSB.data_ptr() != block_tables_GSB.data_ptr():  # else they are where they belong
        block_tables_GSB[:, :S, :count] = tables_GSB
    given = token_ids_T, *rows, *last, packed_tables
    assert all(x is None or x.is_contiguous() for x in given), "the arrays of a step must be contiguous"
    num_drafts = 0 if last.drafts_CK is None else last.drafts_CK.shape[1]
    arguments = np.empty(1, ARGUMENTS)
    sizes = T, S, len(rows.sample_positions_R), len(last.tokens_C), num_drafts, G, count
    arguments[0] = (*map(address, given), *sizes, block_size)
    call(_driver(), arguments)
