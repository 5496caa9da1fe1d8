"""``stage_step``: a program for each sequence."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.stage_step import stage_step
from octavo.ops.triton.launch import after_predecessor, launch

BLOCK = 256


@stage_step.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def stage_step_triton(
    token_ids_T: Tensor,
    cu_seqlens_q: Tensor,
    cells_S: Tensor,
    last_tokens_C: Tensor,
    packed_tables: Tensor,
    width: Tensor,
    block_tables_SB: Tensor,
    first: int = 0,
) -> None:
    """See ``ops.stage_step``."""
    launch(
        _stage_kernel,
        (len(cells_S),),
        token_ids_T,
        cu_seqlens_q,
        cells_S,
        last_tokens_C,
        packed_tables,
        width,
        block_tables_SB,
        block_tables_SB.stride(0),
        first,
        BLOCK=BLOCK,
        num_warps=1,
    )


@triton.jit
def _stage_kernel(
    token_ids: tl.tensor,
    cu_seqlens: tl.tensor,
    cells: tl.tensor,
    last_tokens: tl.tensor,
    packed: tl.tensor,
    width_at: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq = tl.program_id(0)
    after_predecessor(PDL)
    begin, end = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    if end > begin:
        known = tl.load(token_ids + end - 1)
        sampled = tl.load(last_tokens + tl.load(cells + seq))
        tl.store(token_ids + end - 1, tl.where(known < 0, tl.maximum(sampled, 0).to(tl.int64), known))
    width = tl.load(width_at)
    packed += (first + seq).to(tl.int64) * width
    tables += seq.to(tl.int64) * table_stride
    i = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        entries = tl.load(packed + start + i, mask=start + i < width)
        tl.store(tables + start + i, entries, mask=start + i < width)
