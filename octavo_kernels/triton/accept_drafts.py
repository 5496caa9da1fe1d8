"""``accept_drafts``: a program for each sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.drafting import accept_drafts
from octavo_kernels.triton.launch import after_predecessor, launch
from octavo_kernels.triton.stage_step import MOST_SAMPLED


@accept_drafts.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def accept_drafts_triton(tokens_R: Tensor, token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """See ``ops.accept_drafts``."""
    num_accepted_S = torch.empty(len(cu_samples) - 1, dtype=torch.int32, device=tokens_R.device)
    launch(
        _accept_kernel,
        (len(num_accepted_S),),
        tokens_R,
        token_ids_T,
        logits_indices_R,
        cu_samples,
        num_accepted_S,
        SAMPLED=MOST_SAMPLED,
        num_warps=1,
    )
    return num_accepted_S


@triton.jit
def _accept_kernel(
    tokens: tl.tensor,
    token_ids: tl.tensor,
    logits_indices: tl.tensor,
    cu_samples: tl.tensor,
    num_accepted: tl.tensor,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq, j = tl.program_id(0), tl.arange(0, SAMPLED)
    after_predecessor(PDL)
    first = tl.load(cu_samples + seq)
    num_drafts = tl.maximum(tl.load(cu_samples + seq + 1) - first - 1, 0)
    row = tl.load(logits_indices + first + j, mask=j < num_drafts, other=0)
    draft = tl.load(token_ids + row + 1, mask=j < num_drafts, other=-1)
    token = tl.load(tokens + first + j, mask=j < num_drafts, other=-2)
    is_end = token.to(tl.int64) != draft
    tl.store(num_accepted + seq, tl.min(tl.where(is_end, j, SAMPLED), 0))
