"""Limits on the size of a step."""

from __future__ import annotations

from typing import NamedTuple

from octavo.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from octavo.steps.graph_shapes import StepKind, StepShape, padded_shape

MAX_STOPS = 2 * MAX_STOP_TOKEN_IDS
"""Most stop tokens that an executor bans before ``min_tokens``; with more of them, masks are used."""
MAX_BIASES = MAX_LOGIT_BIAS + 2 * MAX_BAD_WORDS
"""Most biases of a sequence; a banned token counts as one."""


INTERVAL = 64
"""Kernels that compute prompts in chunks give the same bits if all chunks but the last end at multiples of this."""


class StateSize(NamedTuple):
    """Size of the pool of states."""

    num_slots: int
    num_held: int
    """Slots that running sequences can need at once; the others are for snapshots alone."""
    every: int
    """Tokens between snapshots in a long prompt: those whose keys and values take as much memory as a state."""
    interval: int = INTERVAL
    has_drafts: bool = False
    """Whether steps verify drafts: a sequence then holds a spare slot."""
    has_marks: bool = False
    """Whether a step can keep states within its chunks."""


class RopeSets(NamedTuple):
    """Rotary frequencies that depend on a text's length: set 0 for short texts, others for longer ones.

    All keys of a text are rotated by one set, as in a forward pass over all of it. A text that grows beyond its set's
    longest is computed again.
    """

    original: int
    """Tokens of the longest text with set 0."""
    step: int = 0
    """0: all longer texts have set 1. Otherwise set n is for texts of n tokens more than the original length. Prompts
    have exactly theirs; behind them the set changes after every so many tokens."""

    def of(self, num_prompt_tokens: int, num_tokens: int) -> tuple[int, int]:
        """The set of a text of ``num_tokens``, and the most tokens with which it keeps that."""
        if num_tokens <= self.original:
            return 0, self.original
        if not self.step:
            return 1, NEVER
        first = max(num_prompt_tokens, self.original)
        grown = num_tokens - first
        if num_prompt_tokens > self.original:  # its set is kept for some tokens more
            grown = max(0, grown - 1) // self.step * self.step
            return first + grown - self.original, first + grown + self.step
        grown = -(-grown // self.step) * self.step
        return grown, self.original + grown


NEVER = 1 << 62
"""More tokens than any text has."""


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

    longest_image: int = 0
    """Positions of an image that are computed in one step, beyond its limit of tokens."""
    num_axes: int = 0
    """Axes of rotary positions; 0: they are those of tokens."""
    num_image_slots: int = 0
    """Slots of the pool of embeddings; 0: the model takes no images."""
    has_rope_sets: bool = False
    """Whether rotary frequencies depend on a text's length; positions have no axes then."""
    dense_context: int = 0
    """See ``GraphLimits``."""

    def largest(self) -> StepShape:
        """A padded shape that no step exceeds."""
        most_rows = max(self.max_num_batched_tokens, self.max_num_seqs, 2) + self.longest_image
        kind, num_drafts = StepKind(True, True, self.num_drafts > 0), self.max_num_seqs * self.max_drafts
        shape, _ = padded_shape(
            max(most_rows, num_drafts + self.max_num_seqs + 1),
            self.max_num_seqs,
            2,
            self.max_num_seqs,
            kind,
            num_drafts,
        )
        return shape._replace(has_images=self.num_image_slots > 0, num_axes=self.num_axes or int(self.has_rope_sets))
