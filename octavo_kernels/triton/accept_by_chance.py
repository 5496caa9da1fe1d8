"""``accept_by_chance``: a program for some rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.drafting import accept_by_chance
from octavo_kernels.triton.launch import after_predecessor, launch
from octavo_kernels.triton.noise import minus_log_exponentials, row_key

BLOCK = 128


@accept_by_chance.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def accept_by_chance_triton(
    tokens_R: Tensor, drafts_R: Tensor, seeds_R: Tensor, positions_R: Tensor, rate: float, vocab_size: int
) -> Tensor:
    """See ``ops.accept_by_chance``; variates near the threshold may round to its other side."""
    found_R = torch.empty_like(tokens_R)
    launch(
        _chance_kernel,
        (triton.cdiv(len(tokens_R), BLOCK),),
        *(tokens_R, drafts_R, seeds_R, positions_R, found_R, len(tokens_R), rate, vocab_size),
        BLOCK=BLOCK,
        IS_CUDA=tokens_R.is_cuda,
        num_warps=4,
    )
    return found_R


@triton.jit(do_not_specialize=["R"])
def _chance_kernel(
    tokens: tl.tensor, drafts: tl.tensor, seeds: tl.tensor, positions: tl.tensor, found: tl.tensor, R: tl.tensor,
    rate: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr, IS_CUDA: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < R
    after_predecessor(PDL)
    token, draft = tl.load(tokens + row, mask=is_row, other=-1), tl.load(drafts + row, mask=is_row, other=-1)
    factor, offset = row_key(tl.load(seeds + row, mask=is_row, other=0), tl.load(positions + row, mask=is_row, other=0))
    variate = tl.exp(-minus_log_exponentials(row * 0, factor, offset, IS_CUDA))
    other = tl.where(token == draft, (token + 1) % vocab_size, token)
    verified = tl.where(tl.exp(-variate) < rate, draft.to(tl.int32), other)
    tl.store(found + row, tl.where((draft < 0) | (token < 0), token, verified), mask=is_row)
