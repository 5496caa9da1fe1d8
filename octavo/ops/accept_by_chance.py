"""Accepts drafts whatever the model says, with a given probability: for measurements of speed alone.

Shapes: R sampled rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.noise import row_exponentials


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
