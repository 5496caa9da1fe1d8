"""``next_tokens``: a program for each sequence, and the last one for the padding behind it, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.stepping import NextTokens, next_tokens
from octavo_kernels.triton.launch import after_predecessor, empty_indices, launch

BLOCK = 256


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
