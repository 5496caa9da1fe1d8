"""A sequence's share of a step."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.steps.shapes import MAX_DRAFTS
from octavo.types import Scheduled, Sequence

PENDING: tuple[int | None, ...] = (None,)
"""The token of a decode whose previous step is still in flight; a constant, since most shares have it."""


def take(seq: Sequence, num_tokens: int, drafts: tuple[int, ...] = (), num_proposed: int = MAX_DRAFTS) -> Scheduled:
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
    if drafts:
        tokens += [None] * len(drafts)
        end += len(drafts)
    seq.num_computed_tokens = end
    seq.decodes = samples
    seq.num_in_flight += 1
    return Scheduled(seq, start, taken, drafts, samples, seq.epoch, seq.num_rejected, num_proposed)


def with_encodes(item: Scheduled, encodes: tuple[Any, ...]) -> Scheduled:
    """A share before which the embeddings of these images have to be computed."""
    return msgspec.structs.replace(item, encodes=encodes) if encodes else item
