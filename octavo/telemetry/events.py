"""What was decided about requests, as it happened: the raw material of ``octavo explain``.

Events are made where something changes for a request, not in every step. Between two events of a request, its steps
are counted by the difference of ``step``, and who shared them by that of ``shares``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from octavo.types import EngineStats

Kind = Literal["arrived", "admitted", "chunk", "preempted", "fault", "ended"]

MAX_EVENTS = 65_536
"""Events that wait to be taken; beyond that the oldest are lost."""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to a request.

    ``arrived``: with ``tokens`` of prompt and earlier output, while ``others`` wait. ``admitted``: ``tokens`` were
    found in the cache, ``others`` run. ``chunk``: ``tokens`` of the prompt from ``start`` on were computed.
    ``preempted``: it lost its blocks, with ``tokens`` computed, to request ``by``. ``fault``: a forward pass with it
    failed, and what it has from ``start`` on is computed again. ``ended``: for a ``reason``, with ``tokens`` of output.
    """

    request_id: int
    kind: Kind
    time: float
    """``time.monotonic()``."""
    step: int
    """Steps that the engine had finished."""
    shares: int
    """Sequences in all those steps, one added for each step it was in."""
    tokens: int = 0
    start: int = 0
    others: int = 0
    by: int = -1
    reason: str = ""


class EventLog:
    """Takes events down, for whoever takes them away."""

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
    ) -> None:
        stats = self._stats
        self._events.append(
            Event(
                request_id,
                kind,
                self._clock(),
                stats.num_steps,
                stats.num_shares,
                tokens,
                start,
                others,
                by,
                reason,
            )
        )

    def take(self) -> list[Event]:
        """Those that were not taken yet."""
        taken = list(self._events)
        self._events.clear()
        return taken
