"""``drafts_behind``: a program for each sequence, and the last one for the padding behind it, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.drafting import drafts_behind
from octavo_kernels.triton.launch import after_predecessor, empty_indices, launch
from octavo_kernels.triton.stage_step import MOST_SAMPLED


@drafts_behind.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def drafts_behind_triton(token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """See ``ops.drafts_behind``."""
    drafts_R = empty_indices(len(logits_indices_R), torch.int64, token_ids_T.device)
    launch(
        _behind_kernel,
        (len(cu_samples) - 1,),
        token_ids_T,
        logits_indices_R,
        cu_samples,
        drafts_R,
        len(drafts_R),
        SAMPLED=MOST_SAMPLED,
        num_warps=1,
    )
    return drafts_R


@triton.jit(do_not_specialize=["num_samples"])
def _behind_kernel(
    token_ids: tl.tensor,
    logits_indices: tl.tensor,
    cu_samples: tl.tensor,
    drafts: tl.tensor,
    num_samples: tl.tensor,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq, j = tl.program_id(0), tl.arange(0, SAMPLED)
    after_predecessor(PDL)
    sample, end = tl.load(cu_samples + seq) + j, tl.load(cu_samples + seq + 1)
    is_followed = sample + 1 < end
    row = tl.load(logits_indices + sample, mask=is_followed, other=0)
    draft = tl.load(token_ids + row + 1, mask=is_followed, other=-1)
    tl.store(drafts + sample, draft, mask=sample < end)
    if seq == tl.num_programs(0) - 1:
        for start in range(end, num_samples, SAMPLED):
            tl.store(drafts + start + j, tl.full([SAMPLED], -1, tl.int64), mask=start + j < num_samples)
