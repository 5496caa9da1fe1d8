"""Events of requests, recorded as they happen: the data behind ``octavo explain``.

An event is recorded when the state of a request changes, not in every step. Between two events of a request, the
difference of ``step`` is its number of steps, and that of ``num_scheduled_seqs`` the sequences in those steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from octavo.types import EngineStats

Kind = Literal["arrived", "admitted", "chunk", "preempted", "fault", "ended"]

MAX_EVENTS = 65_536
"""Buffered events; beyond this number the oldest are dropped."""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event of a request.

    ``arrived``: with ``tokens`` of prompt and earlier output, while ``others`` wait. ``admitted``: ``tokens`` were
    found in the prefix cache, ``others`` run; of a session, it is turn ``turn``, and could repeat ``before`` tokens of
    the turn before. ``chunk``: ``tokens`` of the prompt were computed, from ``start``.
    ``preempted``: it lost its blocks, with ``tokens`` computed, to request ``by``. ``fault``: a forward pass with it
    failed, and tokens from ``start`` are recomputed. ``ended``: with its ``reason`` and ``tokens`` of output; of
    ``drafts`` verified, some were ``accepted``.
    """

    request_id: int
    kind: Kind
    time: float
    """``time.monotonic()``."""
    step: int
    """Steps that the engine had finished."""
    num_scheduled_seqs: int
    """Sum over those steps of the number of sequences in each."""
    tokens: int = 0
    start: int = 0
    others: int = 0
    by: int = -1
    reason: str = ""
    drafts: int = 0
    accepted: int = 0
    turn: int = 0
    before: int = 0


class EventLog:
    """Buffers events until they are taken."""

    def __init__(self, stats: EngineStats, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def note(
        self,
        request_id: int,
        kind: Kind,
        *,
        tokens: int = 0,
        start: int = 0,
        others: int = 0,
        by: int = -1,
        reason: str = "",
        drafts: int = 0,
        accepted: int = 0,
        turn: int = 0,
        before: int = 0,
    ) -> None:
        stats = self._stats
        self._events.append(
            Event(
                request_id,
                kind,
                self._clock(),
                stats.num_steps,
                stats.num_scheduled_seqs,
                tokens,
                start,
                others,
                by,
                reason,
                drafts,
                accepted,
                turn,
                before,
            )
        )

    def take(self) -> list[Event]:
        """Remove and return the buffered events."""
        taken = list(self._events)
        self._events.clear()
        return taken
