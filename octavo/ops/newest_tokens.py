"""Gathers what drafting begins with: each sequence's newest token, and how tokens behind it are sampled.

Shapes: R sampled rows, S sequences, K drafts of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.sample import SampleParams


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
