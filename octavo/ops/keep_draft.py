"""Keeps one sampled draft of each sequence.

Shapes: S sequences, K drafts of a sequence.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def keep_draft(tokens_S: Tensor, drafts_SK: Tensor, index: int, vocab_size: int) -> Tensor:
    """Set column ``index`` of ``drafts`` (int32) to the sampled tokens (int32), and return them as int64 [S].

    What could not be sampled becomes token 0, and what is beyond the vocabulary its last token: drafts need not be
    right, and while kernels are compiled, tokens have any content.
    """
    clamped_S = tokens_S.long().clamp(0, vocab_size - 1)
    drafts_SK[:, index] = clamped_S
    return clamped_S
