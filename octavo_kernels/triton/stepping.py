"""The ends of a step: its inputs, and the results that stay on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.stepping import LastResults, NextTokens, StagedRows, next_tokens, publish_tokens, pull_step, stage_step
from octavo_kernels.triton.launch import after_predecessor, empty_indices, launch

# ---- pull_step: ``pull_step``: some programs that read the host's memory over the bus.


PROGRAMS = 32
BLOCK = 256


@pull_step.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def pull_step_triton(inputs_B: Tensor, uploads_QB: Tensor, counter: Tensor) -> None:
    """See ``ops.pull_step``."""
    Q, words = len(uploads_QB), uploads_QB.view(torch.int64)
    inputs = inputs_B.view(torch.int64)
    launch(_pull_kernel, (PROGRAMS,), inputs, words, counter, words.stride(0), Q=Q, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _pull_kernel(
    inputs: tl.tensor, uploads: tl.tensor, counter: tl.tensor, stride: tl.tensor, Q: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    after_predecessor(PDL)
    uploads += (tl.load(counter) % Q).to(tl.int64) * stride
    end = tl.load(uploads)
    i = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        words = tl.load(uploads + start + i, mask=start + i < end)
        tl.store(inputs + start + i, words, mask=start + i < end)


# ---- stage_step: ``stage_step``: a program for each sequence.


MOST_SAMPLED = 64
"""Sampled rows of a sequence, at most: its drafts and one more."""


@stage_step.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def stage_step_triton(
    token_ids_T: Tensor,
    rows: StagedRows,
    last: LastResults,
    packed_tables: Tensor,
    width: Tensor,
    block_tables_GSB: Tensor,
    block_size: int,
) -> None:
    """See ``ops.stage_step``."""
    launch(
        _stage_kernel, (len(rows.cells_S),), token_ids_T, *rows, *last, packed_tables, width, block_tables_GSB,
        rows.slots_GT.stride(0), block_tables_GSB.stride(0), block_tables_GSB.stride(1),
        NUM_DRAFTS=0 if last.drafts_CK is None else last.drafts_CK.shape[1], HAS_DRAFTS=rows.cu_samples is not None,
        GROUPS=len(block_tables_GSB), BLOCK_SIZE=block_size, SAMPLED=MOST_SAMPLED, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots_stride"])
def _stage_kernel(
    token_ids: tl.tensor, positions: tl.tensor, slots: tl.tensor, sample_positions: tl.tensor, seq_lens: tl.tensor,
    cu_seqlens: tl.tensor, cu_samples: tl.tensor, cells: tl.tensor, last_tokens: tl.tensor, last_positions: tl.tensor,
    drafts: tl.tensor, packed: tl.tensor, width_at: tl.tensor, tables: tl.tensor, slots_stride: tl.tensor,
    group_stride: tl.tensor, table_stride: tl.tensor, NUM_DRAFTS: tl.constexpr, HAS_DRAFTS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SAMPLED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    seq, num_seqs = tl.program_id(0), tl.num_programs(0)
    after_predecessor(PDL)
    begin, end = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    width, cell = tl.load(width_at), tl.load(cells + seq)
    first_sample, num_samples = seq, begin * 0 + 1
    if HAS_DRAFTS:
        first_sample = tl.load(cu_samples + seq)
        num_samples = tl.load(cu_samples + seq + 1) - first_sample
    first_token = tl.load(token_ids + begin, mask=end > begin, other=0)
    planned = tl.load(positions + begin, mask=end > begin, other=0)
    known = tl.load(last_positions + cell).to(tl.int64)
    shift = tl.where((first_token < 0) & (known >= 0), planned - known, 0)

    j = tl.arange(0, SAMPLED)  # the sampled rows, in front of which nothing is unknown
    row = end - num_samples + j
    is_row = (j < num_samples) & (row >= begin)
    token = tl.load(token_ids + row, mask=is_row, other=0)
    found = tl.zeros([SAMPLED], tl.int32) + tl.load(last_tokens + cell)
    if NUM_DRAFTS > 0:
        at = drafts + cell * NUM_DRAFTS + tl.minimum(tl.maximum(j - 1, 0), NUM_DRAFTS - 1)
        found = tl.where(j > 0, tl.load(at, mask=is_row, other=0), found)
    tl.store(token_ids + row, tl.maximum(found, 0).to(tl.int64), mask=is_row & (token < 0))
    position = tl.load(positions + row, mask=is_row, other=0) - shift
    moves = is_row & (shift > 0)
    tl.store(positions + row, position, mask=moves)
    sample = sample_positions + first_sample + j
    is_moved = (j < num_samples) & (shift > 0)
    tl.store(sample, tl.load(sample, mask=is_moved, other=0) - shift.to(tl.int32), mask=is_moved)
    tl.store(seq_lens + seq, tl.load(seq_lens + seq) - shift.to(tl.int32), mask=shift > 0)
    i = tl.arange(0, BLOCK)
    for group in tl.static_range(GROUPS):
        entries = packed + (group * num_seqs + seq).to(tl.int64) * width
        block = tl.load(entries + position // BLOCK_SIZE, mask=moves, other=0).to(tl.int64)
        tl.store(slots + group * slots_stride + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=moves)
        table = tables + group * group_stride + seq.to(tl.int64) * table_stride
        for start in range(0, width, BLOCK):
            known_entries = tl.load(entries + start + i, mask=start + i < width)
            tl.store(table + start + i, known_entries, mask=start + i < width)


# ---- publish_tokens: ``publish_tokens``: one kernel, which writes straight to the memory of the host.


FEWEST = 256
"""One kernel serves all steps of up to this many sampled rows."""


@publish_tokens.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def publish_tokens_triton(
    tokens_R: Tensor,
    positions_R: Tensor,
    cells_S: Tensor,
    last_tokens_C: Tensor,
    last_positions_C: Tensor,
    results_QN: Tensor,
    counter: Tensor,
    num_accepted_S: Tensor | None = None,
    cu_samples: Tensor | None = None,
) -> None:
    """See ``ops.publish_tokens``."""
    R = len(tokens_R)
    launch(
        _publish_kernel, (1,), tokens_R, positions_R, cells_S, last_tokens_C, last_positions_C, results_QN, counter,
        num_accepted_S, cu_samples, R, len(cells_S), results_QN.stride(0), Q=len(results_QN),
        BLOCK=max(FEWEST, triton.next_power_of_2(R)), HAS_DRAFTS=num_accepted_S is not None, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R", "S"])
def _publish_kernel(
    tokens: tl.tensor, positions: tl.tensor, cells: tl.tensor, last_tokens: tl.tensor, last_positions: tl.tensor,
    results: tl.tensor, counter: tl.tensor, num_accepted: tl.tensor, cu_samples: tl.tensor, R: tl.tensor, S: tl.tensor,
    stride: tl.tensor, Q: tl.constexpr, BLOCK: tl.constexpr, HAS_DRAFTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.arange(0, BLOCK)
    after_predecessor(PDL)
    step = tl.load(counter)
    row = results + (step % Q).to(tl.int64) * stride
    tl.store(row + i, tl.load(tokens + i, mask=i < R), mask=i < R)
    last = i
    if HAS_DRAFTS:
        accepted = tl.load(num_accepted + i, mask=i < S, other=0)
        tl.store(row + R + i, accepted, mask=i < S)
        last = tl.minimum(tl.load(cu_samples + i, mask=i < S, other=0) + accepted, R - 1)
    cell = tl.load(cells + i, mask=i < S, other=0)
    tl.store(last_tokens + cell, tl.load(tokens + last, mask=i < S), mask=i < S)
    tl.store(last_positions + cell, tl.load(positions + last, mask=i < S), mask=i < S)
    tl.debug_barrier()  # all have read the count
    tl.store(counter, step + 1)


# ---- next_tokens: ``next_tokens``: a program for each sequence, and the last one for the padding behind it, too.


@next_tokens.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def next_tokens_triton(
    token_ids_T: Tensor,
    cu_seqlens_q: Tensor,
    cu_samples: Tensor | None,
    num_accepted_S: Tensor | None,
    tokens_R: Tensor,
    given_S: Tensor,
    vocab_size: int,
) -> NextTokens:
    """See ``ops.next_tokens``."""
    T, S = len(token_ids_T), len(given_S)
    numbers = empty_indices(T + 2 * S, torch.int64, given_S.device)
    found = NextTokens(numbers[:T], numbers[T : T + S], numbers[T + S :])
    launch(
        _next_kernel,
        (S,),
        *(token_ids_T, cu_seqlens_q, cu_samples, num_accepted_S, tokens_R, given_S, *found),
        *(T, len(tokens_R), vocab_size),
        BLOCK=BLOCK,
        num_warps=1,
    )
    return found


@triton.jit(do_not_specialize=["num_rows", "num_samples"])
def _next_kernel(
    token_ids: tl.tensor, cu_seqlens: tl.tensor, cu_samples: tl.tensor, num_accepted: tl.tensor, tokens: tl.tensor,
    given: tl.tensor, next_ids: tl.tensor, last_rows: tl.tensor, last_samples: tl.tensor, num_rows: tl.tensor,
    num_samples: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    seq = tl.program_id(0)
    after_predecessor(PDL)
    begin, end = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    first_sample, last_sample = seq, seq
    if cu_samples is not None:
        first_sample, last_sample = tl.load(cu_samples + seq), tl.load(cu_samples + seq + 1) - 1
    first_sampled = end - 1 - (last_sample - first_sample)
    behind = tl.load(given + seq).to(tl.int64)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        is_sampled = row >= first_sampled
        following = tl.load(token_ids + row + 1, mask=(row < end) & ~is_sampled, other=0)
        at = tl.minimum(tl.maximum(first_sample + row - first_sampled, 0), num_samples - 1)
        token = tl.load(tokens + at, mask=(row < end) & is_sampled, other=0).to(tl.int64)
        token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
        token = tl.where(behind >= 0, behind, token)
        tl.store(next_ids + row, tl.where(is_sampled, token, following), mask=row < end)
    if seq == tl.num_programs(0) - 1:
        for start in range(end, num_rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            tl.store(next_ids + row, tl.zeros([BLOCK], tl.int64), mask=row < num_rows)
    num_rejected = end * 0
    if num_accepted is not None:
        num_rejected = tl.maximum(last_sample - first_sample - tl.load(num_accepted + seq), 0)
    tl.store(last_rows + seq, tl.maximum(end - 1 - num_rejected, 0).to(tl.int64))
    sample = tl.minimum(tl.maximum(last_sample - num_rejected, 0), num_samples - 1)
    tl.store(last_samples + seq, sample.to(tl.int64))
