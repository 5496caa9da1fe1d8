"""The work of a step: what its duration is learned from, predicted from and simulated from."""

from __future__ import annotations

from typing import NamedTuple

from octavo.steps.shapes import NO_DRAFTER
from octavo.types import Plan


class StepWork(NamedTuple):
    """Quantities that determine the duration of a step."""

    tokens: int
    """Drafts included."""
    rows: int
    """Rows whose logits are sampled."""
    context: int
    """Cached positions read: the sum of ``seq_lens``."""
    pairs: int
    """Query-key pairs of attention, over all sequences."""
    idle: int = 0
    """1 if no other step was in flight at submission, so that launch overhead is not hidden."""
    rested: int = 0
    """1 if also no step ended in the last ``step_times.REST`` seconds, so that caches are cold and clocks are low."""
    sequences: int = 0
    has_prompt: int = 0
    """1 if any sequence computes more than one token, drafts aside."""
    drafted_rows: int = 0
    """Rows with which the executor's drafter fills its cache: all of them, or none if it rests."""
    num_proposed: int = 0
    """Drafts that it makes for each sequence."""
    num_verified: int = 0
    """Drafts among the tokens: each has logits, and they make for more padding."""

    @classmethod
    def of_decodes(cls, num_seqs: int, context: int) -> StepWork:
        """A step in which so many sequences decode, behind ``context`` positions together."""
        return cls(num_seqs, num_seqs, context + num_seqs, context + num_seqs, sequences=num_seqs)


def work_of(plan: Plan, has_drafts: bool = True) -> StepWork:
    """The work of ``plan``; or of the same step without drafts while the drafter rests."""
    context = pairs = num_verified = has_prompt = 0
    tokens = rows = len(plan)
    for item in plan:
        context += item.start
        if len(item.tokens) == 1 and not item.drafts:
            continue
        num_drafts = len(item.drafts) if has_drafts else 0
        more = len(item.tokens) - 1 + num_drafts
        tokens += more
        rows += num_drafts if item.samples else -1
        pairs += more * item.start + (more + 1) * (more + 2) // 2 - 1
        num_verified += num_drafts
        if len(item.tokens) > 1:
            has_prompt = 1
    num_proposed = max([item.num_proposed for item in plan], default=NO_DRAFTER)
    has_drafter = has_drafts and num_proposed != NO_DRAFTER
    return StepWork(
        tokens,
        rows,
        context + tokens,
        context + len(plan) + pairs,
        sequences=len(plan),
        has_prompt=has_prompt,
        drafted_rows=tokens if has_drafter else 0,
        num_proposed=num_proposed if has_drafter else 0,
        num_verified=num_verified,
    )
