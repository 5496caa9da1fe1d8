"""Speculative decoding: which drafts are accepted, and the rows of a drafter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.drafting import (
    DraftRows,
    NewestTokens,
    accept_by_chance,
    accept_drafts,
    draft_rows,
    drafts_behind,
    keep_draft,
    newest_tokens,
)
from octavo.ops.sampling.sampling import SampleParams
from octavo_kernels.triton.launch import after_predecessor, empty_indices, launch
from octavo_kernels.triton.sampling.noise import minus_log_exponentials, row_key
from octavo_kernels.triton.stepping import MOST_SAMPLED

# ---- accept_drafts: ``accept_drafts``: a program for each sequence.


@accept_drafts.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def accept_drafts_triton(tokens_R: Tensor, token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """See ``ops.accept_drafts``."""
    num_accepted_S = torch.empty(len(cu_samples) - 1, dtype=torch.int32, device=tokens_R.device)
    launch(
        _accept_kernel, (len(num_accepted_S),), tokens_R, token_ids_T, logits_indices_R, cu_samples, num_accepted_S,
        SAMPLED=MOST_SAMPLED, num_warps=1,
    )  # fmt: skip
    return num_accepted_S


@triton.jit
def _accept_kernel(
    tokens: tl.tensor, token_ids: tl.tensor, logits_indices: tl.tensor, cu_samples: tl.tensor, num_accepted: tl.tensor,
    SAMPLED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    seq, j = tl.program_id(0), tl.arange(0, SAMPLED)
    after_predecessor(PDL)
    first = tl.load(cu_samples + seq)
    num_drafts = tl.maximum(tl.load(cu_samples + seq + 1) - first - 1, 0)
    row = tl.load(logits_indices + first + j, mask=j < num_drafts, other=0)
    draft = tl.load(token_ids + row + 1, mask=j < num_drafts, other=-1)
    token = tl.load(tokens + first + j, mask=j < num_drafts, other=-2)
    is_end = token.to(tl.int64) != draft
    tl.store(num_accepted + seq, tl.min(tl.where(is_end, j, SAMPLED), 0))


# ---- accept_by_chance: ``accept_by_chance``: a program for some rows.


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


# ---- drafts_behind: ``drafts_behind``: a program for each sequence, and the last one for the padding behind it, too.


@drafts_behind.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def drafts_behind_triton(token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """See ``ops.drafts_behind``."""
    drafts_R = empty_indices(len(logits_indices_R), torch.int64, token_ids_T.device)
    launch(
        _behind_kernel, (len(cu_samples) - 1,), token_ids_T, logits_indices_R, cu_samples, drafts_R, len(drafts_R),
        SAMPLED=MOST_SAMPLED, num_warps=1,
    )  # fmt: skip
    return drafts_R


@triton.jit(do_not_specialize=["num_samples"])
def _behind_kernel(
    token_ids: tl.tensor, logits_indices: tl.tensor, cu_samples: tl.tensor, drafts: tl.tensor, num_samples: tl.tensor,
    SAMPLED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
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


# ---- newest_tokens: ``newest_tokens``: a program for some sequences.


NEWEST_BLOCK = 64


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
        (triton.cdiv(S, NEWEST_BLOCK),),
        *(tokens_R, *params_R, last_samples_S, tokens_S, *params_S, positions_KS, S, num_drafts, vocab_size),
        IS_GREEDY=is_greedy,
        BLOCK=NEWEST_BLOCK,
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


# ---- draft_rows: ``draft_rows``: a program for each sequence.


@draft_rows.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def draft_rows_triton(
    positions_T: Tensor,
    last_rows_S: Tensor,
    capacities_S: Tensor,
    block_tables_GSB: Tensor,
    num_passes: int,
    block_size: int,
) -> DraftRows:
    """See ``ops.draft_rows``."""
    P, (G, S, B), device = num_passes, block_tables_GSB.shape, positions_T.device
    longs = empty_indices((1 + G) * P * S, torch.int64, device)
    ints = empty_indices(P * S + S + 1, torch.int32, device)
    positions_PS, slots_GPS = longs[: P * S].view(P, S), longs[P * S :].view(G, P, S)
    found = DraftRows(positions_PS, slots_GPS, ints[: P * S].view(P, S), ints[P * S :])
    launch(
        _rows_kernel, (S,), *(positions_T, last_rows_S, capacities_S, block_tables_GSB, *found),
        *(S, B, block_tables_GSB.stride(0), block_tables_GSB.stride(1)), P=P, PASSES=triton.next_power_of_2(P),
        GROUPS=G, BLOCK_SIZE=block_size, SEQS=triton.next_power_of_2(S), num_warps=1,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["num_seqs", "table_width", "group_stride"])
def _rows_kernel(
    positions: tl.tensor, last_rows: tl.tensor, capacities: tl.tensor, tables: tl.tensor, out_positions: tl.tensor,
    out_slots: tl.tensor, out_lens: tl.tensor, out_starts: tl.tensor, num_seqs: tl.tensor, table_width: tl.tensor,
    group_stride: tl.tensor, table_stride: tl.tensor, P: tl.constexpr, PASSES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEQS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    seq, p, s = tl.program_id(0), tl.arange(0, PASSES), tl.arange(0, SEQS)
    after_predecessor(PDL)
    capacity = tl.load(capacities + seq)
    position = tl.load(positions + tl.load(last_rows + seq)) + 1 + p
    is_pass, at = p < P, p * num_seqs + seq
    tl.store(out_positions + at, position, mask=is_pass)
    tl.store(out_lens + at, tl.minimum(position + 1, capacity).to(tl.int32), mask=is_pass)
    for group in tl.static_range(GROUPS):
        table = tables + group * group_stride + seq.to(tl.int64) * table_stride
        entry = tl.minimum(position // BLOCK_SIZE, table_width - 1)
        block = tl.load(table + entry, mask=is_pass, other=0).to(tl.int64)
        slot = tl.where(position < capacity, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(out_slots + group * P * num_seqs + at, slot, mask=is_pass)
    has_row = tl.load(capacities + s, mask=s <= seq, other=0) > 0
    tl.store(out_starts + seq * 0, 0, mask=seq == 0)
    tl.store(out_starts + seq + 1, tl.sum(has_row.to(tl.int32), 0))


# ---- keep_draft: ``keep_draft``: a program for some sequences.


@keep_draft.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def keep_draft_triton(tokens_S: Tensor, drafts_SK: Tensor, index: int, vocab_size: int) -> Tensor:
    """See ``ops.keep_draft``."""
    S = len(tokens_S)
    kept_S = empty_indices(S, torch.int64, tokens_S.device)
    launch(
        _keep_kernel, (triton.cdiv(S, BLOCK),), tokens_S, drafts_SK, kept_S, S, index, drafts_SK.stride(0), vocab_size,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return kept_S


@triton.jit(do_not_specialize=["S", "index", "row_stride"])
def _keep_kernel(
    tokens: tl.tensor, drafts: tl.tensor, kept: tl.tensor, S: tl.tensor, index: tl.tensor, row_stride: tl.tensor,
    vocab_size: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    token = tl.load(tokens + seq, mask=seq < S, other=0).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    tl.store(kept + seq, token, mask=seq < S)
    tl.store(drafts + seq * row_stride + index, token.to(tl.int32), mask=seq < S)
