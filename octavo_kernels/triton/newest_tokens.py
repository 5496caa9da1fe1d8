"""``newest_tokens``: a program for some sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.drafting import NewestTokens, newest_tokens
from octavo.ops.sampling import SampleParams
from octavo_kernels.triton.launch import after_predecessor, empty_indices, launch

BLOCK = 64


@newest_tokens.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def newest_tokens_triton(
    tokens_R: Tensor,
    params_R: SampleParams,
    last_samples_S: Tensor,
    num_drafts: int,
    vocab_size: int,
    is_greedy: bool = False,
) -> NewestTokens:
    """See ``ops.newest_tokens``."""
    S, device = len(last_samples_S), tokens_R.device
    tokens_S = empty_indices(S, torch.int64, device)
    params_S = SampleParams(*(torch.empty(S, dtype=column.dtype, device=device) for column in params_R))
    positions_KS = torch.empty(num_drafts, S, dtype=torch.int32, device=device)
    launch(
        _newest_kernel,
        (triton.cdiv(S, BLOCK),),
        *(tokens_R, *params_R, last_samples_S, tokens_S, *params_S, positions_KS, S, num_drafts, vocab_size),
        IS_GREEDY=is_greedy,
        BLOCK=BLOCK,
        num_warps=2,
    )
    return NewestTokens(tokens_S, params_S, positions_KS)


@triton.jit(do_not_specialize=["S", "num_drafts"])
def _newest_kernel(
    tokens: tl.tensor, temperatures: tl.tensor, min_ps: tl.tensor, top_ks: tl.tensor, top_ps: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, last_samples: tl.tensor, to_tokens: tl.tensor, to_temperatures: tl.tensor,
    to_min_ps: tl.tensor, to_top_ks: tl.tensor, to_top_ps: tl.tensor, to_seeds: tl.tensor, to_positions: tl.tensor,
    ahead: tl.tensor, S: tl.tensor, num_drafts: tl.tensor, vocab_size: tl.tensor, IS_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq = seq < S
    after_predecessor(PDL)
    row = tl.load(last_samples + seq, mask=is_seq, other=0)
    token = tl.load(tokens + row, mask=is_seq, other=0).to(tl.int64)
    tl.store(to_tokens + seq, tl.minimum(tl.maximum(token, 0), vocab_size - 1), mask=is_seq)
    temperature = tl.load(temperatures + row, mask=is_seq, other=0.0)
    tl.store(to_temperatures + seq, temperature * 0.0 if IS_GREEDY else temperature, mask=is_seq)
    tl.store(to_min_ps + seq, tl.load(min_ps + row, mask=is_seq, other=0.0), mask=is_seq)
    tl.store(to_top_ks + seq, tl.load(top_ks + row, mask=is_seq, other=0), mask=is_seq)
    tl.store(to_top_ps + seq, tl.load(top_ps + row, mask=is_seq, other=0.0), mask=is_seq)
    tl.store(to_seeds + seq, tl.load(seeds + row, mask=is_seq, other=0), mask=is_seq)
    position = tl.load(positions + row, mask=is_seq, other=0)
    tl.store(to_positions + seq, position, mask=is_seq)
    for i in range(num_drafts):
        tl.store(ahead + i * S + seq, position + 1 + i, mask=is_seq)
