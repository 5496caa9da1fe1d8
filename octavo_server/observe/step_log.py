"""What an engine's last steps computed, for those who watch: made of the reports of its steps, while anybody does.

There is no token in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from octavo.telemetry.request_events import Event
from octavo.types import EngineStats, Output

WATCHED_SECONDS = 5.0
"""How long steps are noted after somebody asked for them."""
MAX_STEPS = 32
"""Most steps between two questions; the youngest are kept."""
MAX_SHARES = 64
"""Most requests of a step that are told one by one."""


class StepShare(msgspec.Struct, array_like=True, gc=False):
    """What a step computed of one request."""

    request: int
    prompt: int = 0
    """Tokens of the prompt, from ``start`` on."""
    start: int = 0
    output: int = 0
    """Tokens that were sampled."""
    drafts: int = 0
    """Drafts that were verified for them."""
    accepted: int = 0
    """Of those, accepted ones."""
    cached: int = 0
    """Tokens that were found in the prefix cache, as it was admitted to this step."""
    end: str = ""
    """Why the request ended in this step, or lost its blocks: a finish reason, or ``preempted``; "" if neither."""


class StepView(msgspec.Struct, gc=False):
    """A step."""

    number: int
    seconds: float
    tokens: int
    waiting: int
    """Requests that were in no step yet."""
    shares: list[StepShare]
    others: int
    """Further requests in it."""


class StepLog:
    """The steps of an engine, or of several that share it."""

    def __init__(self) -> None:
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self._watched_until = 0.0

    def take(self, now: float) -> list[StepView]:
        """The steps since the last call, and note those to come; ``now`` is ``time.monotonic()``."""
        self._watched_until = now + WATCHED_SECONDS
        taken = list(self._steps)
        self._steps.clear()
        return taken

    def note(self, stats: EngineStats, outputs: Sequence[Output], events: Sequence[Event], now: float) -> None:
        """Note what is reported of a step, if anybody watches and it computed something."""
        if now < self._watched_until and (outputs or any(event.kind == "chunk" for event in events)):
            self._steps.append(_view_of(stats, outputs, events))


def _view_of(stats: EngineStats, outputs: Sequence[Output], events: Sequence[Event]) -> StepView:
    shares = dict[int, StepShare]()
    for event in events:
        share = shares.setdefault(event.request_id, StepShare(event.request_id))
        if event.kind == "chunk":
            share.prompt, share.start = share.prompt + event.tokens, share.start or event.start
        elif event.kind == "admitted":
            share.cached = event.tokens
        elif event.kind == "preempted":
            share.end = event.kind
    for output in outputs:
        share = shares.setdefault(output.request_id, StepShare(output.request_id))
        share.output, share.end = len(output.tokens), output.finish_reason or share.end
        share.drafts, share.accepted = output.num_drafts, output.num_accepted_drafts
    found = [share for share in shares.values() if share.prompt or share.output or share.end]
    return StepView(
        stats.num_steps,
        round(stats.step_seconds, 6),
        stats.step_tokens,
        stats.num_waiting,
        found[:MAX_SHARES],
        max(0, len(found) - MAX_SHARES),
    )
