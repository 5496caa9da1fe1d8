"""``keep_draft``: a program for some sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.drafting import keep_draft
from octavo_kernels.triton.launch import after_predecessor, empty_indices, launch

BLOCK = 128


@keep_draft.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def keep_draft_triton(tokens_S: Tensor, drafts_SK: Tensor, index: int, vocab_size: int) -> Tensor:
    """See ``ops.keep_draft``."""
    S = len(tokens_S)
    kept_S = empty_indices(S, torch.int64, tokens_S.device)
    sizes = S, index, drafts_SK.stride(0), vocab_size
    launch(_keep_kernel, (triton.cdiv(S, BLOCK),), tokens_S, drafts_SK, kept_S, *sizes, BLOCK=BLOCK, num_warps=4)
    return kept_S


@triton.jit(do_not_specialize=["S", "index", "row_stride"])
def _keep_kernel(
    tokens: tl.tensor,
    drafts: tl.tensor,
    kept: tl.tensor,
    S: tl.tensor,
    index: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    token = tl.load(tokens + seq, mask=seq < S, other=0).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    tl.store(kept + seq, token, mask=seq < S)
    tl.store(drafts + seq * row_stride + index, token.to(tl.int32), mask=seq < S)
