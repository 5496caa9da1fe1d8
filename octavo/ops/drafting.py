"""Speculative decoding on the device: which drafts are accepted, and the rows of a drafter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.sampling.noise import row_exponentials
from octavo.ops.sampling.sampling import SampleParams

# ---- accept_drafts: Counts the drafts that a step accepts. Shapes: T rows, S sequences, R sampled rows.


@op
def accept_drafts(tokens_R: Tensor, token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """The number of accepted drafts of each sequence; int32 [S].

    The sampled rows ``cu_samples[s]`` to ``cu_samples[s + 1]`` (int32 [S + 1]) belong to sequence s: that of its last
    token and those of its drafts, which are rows ``logits_indices`` (int64) of ``token_ids`` (int64). A draft is
    accepted if it, and all before it, are the tokens (int32) sampled in the rows before them.
    """
    T, S = len(token_ids_T), len(cu_samples) - 1
    R = torch.arange(len(tokens_R), device=tokens_R.device)
    begins_S, ends_S = cu_samples[:-1].long(), cu_samples[1:].long()
    seq_R = torch.searchsorted(ends_S, R, right=True).clamp(max=S - 1)
    is_draft_R = ends_S[seq_R] > R + 1
    drafts_R = token_ids_T[(logits_indices_R + 1).clamp(max=T - 1)]
    is_end_R = ~(is_draft_R & (tokens_R.long() == drafts_R))
    first_end_R = torch.where(is_end_R & (ends_S[-1] > R), R - begins_S[seq_R], T)
    found_S = torch.full_like(begins_S, T).scatter_reduce_(0, seq_R, first_end_R, "amin")
    return found_S.masked_fill_(ends_S == begins_S, 0).int()


# ---- accept_by_chance: Accepts drafts whatever the model says, with a given probability: for measurements of speed
# alone. Shapes: R sampled rows.


@op
def accept_by_chance(
    tokens_R: Tensor, drafts_R: Tensor, seeds_R: Tensor, positions_R: Tensor, rate: float, vocab_size: int
) -> Tensor:
    """The drafts (int64) that are accepted, and other tokens where they are not; int32 [R].

    A draft is accepted where ``exp(-x)`` is less than ``rate``, with x the exponential variate of token 0 at these
    ``positions`` (int32), by ``seeds`` (int64). Otherwise the sampled token (int32) is taken, or the one behind it if
    that is the draft. Without a draft, which is then negative, and for a negative token, it is the token.
    """
    uniform_R = torch.exp(-row_exponentials(1, seeds_R, positions_R).squeeze(1))
    others_R = torch.where(tokens_R == drafts_R, (tokens_R + 1) % vocab_size, tokens_R)
    verified_R = torch.where(uniform_R < rate, drafts_R.int(), others_R)
    return torch.where((drafts_R < 0) | (tokens_R < 0), tokens_R, verified_R)


# ---- drafts_behind: Finds the draft behind each sampled row of a step. Shapes: T rows, S sequences, R sampled rows.


@op
def drafts_behind(token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """The token in the row behind each sampled row, int64 [R]; -1 where that is no draft, and for padding.

    The sampled rows ``cu_samples[s]`` to ``cu_samples[s + 1]`` (int32 [S + 1]) belong to sequence s: that of its last
    token and those of its drafts, which are rows ``logits_indices`` (int64) of ``token_ids`` (int64).
    """
    T, R = len(token_ids_T), len(logits_indices_R)
    samples_R, ends_S = torch.arange(R, device=token_ids_T.device), cu_samples[1:].long()
    seq_R = torch.searchsorted(ends_S, samples_R, right=True).clamp(max=len(ends_S) - 1)
    behind_R = token_ids_T[(logits_indices_R + 1).clamp(max=T - 1)]
    return behind_R.masked_fill(samples_R + 1 >= ends_S[seq_R], -1)


# ---- newest_tokens: Gathers what drafting begins with: each sequence's newest token, and how tokens behind it are
# sampled. Shapes: R sampled rows, S sequences, K drafts of a sequence.


class NewestTokens(NamedTuple):
    """The newest token of each sequence, behind which is drafted."""

    tokens_S: Tensor
    """int64; 0 if it could not be sampled."""
    params_S: SampleParams
    """Sampling parameters of each sequence; ``position`` is that of its newest token."""
    positions_KS: Tensor
    """int32: the positions of the drafts."""


@op
def newest_tokens(
    tokens_R: Tensor,
    params_R: SampleParams,
    last_samples_S: Tensor,
    num_drafts: int,
    vocab_size: int,
    is_greedy: bool = False,
) -> NewestTokens:
    """What rows ``last_samples`` (int64) of the sampled tokens (int32) and of their parameters say.

    ``is_greedy``: the temperature is 0, whatever it is for the token.
    """
    params_S = SampleParams(*(column[last_samples_S] for column in params_R))
    if is_greedy:
        params_S = params_S._replace(temperature=torch.zeros_like(params_S.temperature))
    ahead_K = torch.arange(1, num_drafts + 1, dtype=torch.int32, device=tokens_R.device)
    tokens_S = tokens_R[last_samples_S].long().clamp(0, vocab_size - 1)
    return NewestTokens(tokens_S, params_S, params_S.position + ahead_K.unsqueeze(1))


# ---- draft_rows: The rows in which a drafter computes one draft after the other, behind the newest token of each
# sequence. Shapes: T rows of the step, S sequences, P passes, G KV groups, B entries of the widest block table.


class DraftRows(NamedTuple):
    """One row for each sequence and pass."""

    positions_PS: Tensor
    """int64"""
    slots_GPS: Tensor
    """int64; -1 where the sequence has no block."""
    seq_lens_PS: Tensor
    """int32: the positions that are attended, at most those with a block."""
    cu_seqlens_q: Tensor
    """int32 [S + 1], the same for all passes; sequences of padding, which are the last and have no blocks, have no
    row."""


@op
def draft_rows(
    positions_T: Tensor,
    last_rows_S: Tensor,
    capacities_S: Tensor,
    block_tables_GSB: Tensor,
    num_passes: int,
    block_size: int,
) -> DraftRows:
    """The rows behind ``positions_T[last_rows_S]`` (both int64), at the next position in each pass.

    ``capacities`` (int32): positions of each sequence that have a block in every group; block tables are int32.
    """
    ahead_P = torch.arange(1, num_passes + 1, device=positions_T.device)
    positions_PS = positions_T[last_rows_S] + ahead_P.unsqueeze(1)
    blocks_PS = (positions_PS // block_size).clamp(max=block_tables_GSB.shape[2] - 1)
    indices_GSP = blocks_PS.t().expand(len(block_tables_GSB), -1, -1)
    slots_GPS = block_tables_GSB.gather(2, indices_GSP).transpose(1, 2) * block_size + positions_PS % block_size
    slots_GPS = slots_GPS.masked_fill(positions_PS >= capacities_S, -1)
    has_row_S = (capacities_S > 0).int()
    starts = torch.cat((has_row_S.new_zeros(1), has_row_S.cumsum(0, dtype=torch.int32)))
    return DraftRows(positions_PS, slots_GPS, torch.minimum(positions_PS + 1, capacities_S).int(), starts)


# ---- keep_draft: Keeps one sampled draft of each sequence. Shapes: S sequences, K drafts of a sequence.


@op
def keep_draft(tokens_S: Tensor, drafts_SK: Tensor, index: int, vocab_size: int) -> Tensor:
    """Set column ``index`` of ``drafts`` (int32) to the sampled tokens (int32), and return them as int64 [S].

    What could not be sampled becomes token 0, and what is beyond the vocabulary its last token: drafts need not be
    right, and while kernels are compiled, tokens have any content.
    """
    clamped_S = tokens_S.long().clamp(0, vocab_size - 1)
    drafts_SK[:, index] = clamped_S
    return clamped_S
