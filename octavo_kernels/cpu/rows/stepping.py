"""The ends of a step: its inputs, and the results that stay on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.stepping import LastResults, NextTokens, StagedRows, next_tokens, stage_step
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, inlined, rarely_used
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.tensors import address

# ---- stage_step: ``stage_step``: one loop over sequences.


STAGE_STEP_ARGUMENTS = fields(
    "ids positions slots sample_positions lengths cu_seqlens cu_samples cells last_tokens last_positions drafts "
    "packed T S R C K G width block_size"
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


@rarely_used
@driver
def _stage_step_driver(pool: int, arguments: int) -> int:
    a = read(arguments, STAGE_STEP_ARGUMENTS)
    samples = view(a.cu_samples, a.S + 1, np.int32)
    for s in range(a.S):
        if a.cu_samples:
            _stage_sequence(a, s, np.int64(samples[s]), np.int64(samples[s + 1] - samples[s]))
        else:
            _stage_sequence(a, s, np.int64(s), np.int64(1))
    return 0


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
    sizes = T, S, len(rows.sample_positions_R), len(last.tokens_C), num_drafts, G, count
    call(_stage_step_driver(), STAGE_STEP_ARGUMENTS, (*map(address, given), *sizes, block_size))


# ---- next_tokens: ``next_tokens``: one loop over the rows of each sequence.


NEXT_TOKENS_ARGUMENTS = fields(
    "ids cu_seqlens cu_samples accepted tokens given behind last_rows last_samples T S R vocab_size"
)


@rarely_used
@driver
def _next_tokens_driver(pool: int, arguments: int) -> int:
    a = read(arguments, NEXT_TOKENS_ARGUMENTS)
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
    values = (*map(address, dense), *map(address, found), T, S, R, vocab_size)
    call(_next_tokens_driver(), NEXT_TOKENS_ARGUMENTS, values)
    return found
