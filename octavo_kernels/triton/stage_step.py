"""``stage_step``: a program for each sequence."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.stepping import LastResults, StagedRows, stage_step
from octavo_kernels.triton.launch import after_predecessor, launch

BLOCK = 256
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
        _stage_kernel,
        (len(rows.cells_S),),
        token_ids_T,
        *rows,
        *last,
        packed_tables,
        width,
        block_tables_GSB,
        rows.slots_GT.stride(0),
        block_tables_GSB.stride(0),
        block_tables_GSB.stride(1),
        NUM_DRAFTS=0 if last.drafts_CK is None else last.drafts_CK.shape[1],
        HAS_DRAFTS=rows.cu_samples is not None,
        GROUPS=len(block_tables_GSB),
        BLOCK_SIZE=block_size,
        SAMPLED=MOST_SAMPLED,
        BLOCK=BLOCK,
        num_warps=1,
    )


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
