"""Limits on the size of a step."""

from __future__ import annotations

from typing import NamedTuple

from octavo.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from octavo.steps.shapes import MIXED_DRAFTS_FACTOR, Kind, StepShape, padded_drafts, padded_shape

MAX_STOPS = 2 * MAX_STOP_TOKEN_IDS
"""Most stop tokens that an executor bans before ``min_tokens``; with more of them, masks are used."""
MAX_BIASES = MAX_LOGIT_BIAS + 2 * MAX_BAD_WORDS
"""Most biases of a sequence; a banned token counts as one."""


class StepLimits(NamedTuple):
    """Limits that every encoded step obeys, and for which an executor allocates buffers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks: int
    """Entries of a block table."""
    max_drafts: int = 0
    """Drafts of a sequence in a step."""
    num_drafts: int = 0
    """Drafts that the executor's drafter makes for a sequence; 0: it has none."""

    def largest(self) -> StepShape:
        """A padded shape that no step exceeds."""
        most_rows = max(self.max_num_batched_tokens, self.max_num_seqs, 2)
        shape, _ = padded_shape(most_rows, self.max_num_seqs, 2, self.max_num_seqs, Kind(True, True))
        shape = shape._replace(has_drafter=self.num_drafts > 0)
        if not self.max_drafts:
            return shape
        num_drafts = padded_drafts(self.max_num_seqs * self.max_drafts, MIXED_DRAFTS_FACTOR)
        num_rows = max(shape.num_rows, shape.num_seqs + num_drafts + 1)
        return shape._replace(num_rows=num_rows, num_drafts=num_drafts)
