"""A sequence's share of a step."""

from __future__ import annotations

from octavo.types import Scheduled, Sequence

PENDING: tuple[int | None, ...] = (None,)
"""The token of a decode whose previous step is still in flight; a constant, since most shares have it."""


def take(seq: Sequence, num_tokens: int, drafts: tuple[int, ...] = ()) -> Scheduled:
    """Schedule the next ``num_tokens`` tokens of ``seq``, then ``drafts``: they are now in flight."""
    start = seq.num_computed_tokens
    end = start + num_tokens
    tokens = seq.tokens
    samples = end == len(tokens)
    taken = PENDING
    if tokens[start] is not None:
        taken = (tokens[start],) if num_tokens == 1 else tuple(tokens[start:end])
    if samples:
        tokens.append(None)
    seq.num_computed_tokens = end + len(drafts) if drafts else end
    seq.num_in_flight += 1
    return Scheduled(seq, start, taken, drafts, samples, seq.epoch)


def take_drafts(seq: Sequence, num_tokens: int, limit: int) -> tuple[int, ...]:
    """The drafts to verify after ``num_tokens`` tokens, at most ``limit`` tokens in total; none before the last token
    is known."""
    position = seq.num_computed_tokens + num_tokens
    drafts, seq.draft_tokens = seq.draft_tokens, []
    if seq.num_in_flight or position < len(seq.tokens):
        return ()
    return tuple(drafts[: max(0, min(limit - num_tokens, seq.max_computed_tokens - position))])
