"""The events of recent requests, kept where engine processes come and go."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from octavo.cache.kv_events import KVEvent
from octavo.telemetry.events import Event
from octavo.telemetry.explain import explain

MAX_REQUESTS = 2000
MAX_EVENTS_EACH = 1000
MAX_KV_EVENTS = 100_000
MAX_KV_EVENTS_AT_ONCE = 1000


class Timelines:
    """What was decided about the latest requests, by the ids that clients know."""

    def __init__(self) -> None:
        self._events: OrderedDict[int, list[Event]] = OrderedDict()
        self._names: OrderedDict[str, list[int]] = OrderedDict()
        self._owners: OrderedDict[int, str] = OrderedDict()

    def add(self, events: Iterable[Event]) -> None:
        """Take events of a step."""
        for event in events:
            known = self._events.get(event.request_id)
            if known is None:
                if event.kind != "arrived":
                    continue  # it was forgotten since then
                known = self._events[event.request_id] = []
                if len(self._events) > MAX_REQUESTS:
                    self._events.popitem(last=False)
            if len(known) < MAX_EVENTS_EACH or event.kind == "ended":
                known.append(event)

    def own(self, request_id: int, owner: str) -> None:
        """The request is that of ``owner``, the name of a key."""
        self._owners[request_id] = owner
        if len(self._owners) > MAX_REQUESTS:
            self._owners.popitem(last=False)

    def name(self, name: str, request_ids: Sequence[int]) -> None:
        """The answer called ``name`` is that of these requests."""
        self._names[name] = list(request_ids)
        if len(self._names) > MAX_REQUESTS:
            self._names.popitem(last=False)

    def report(self, name: str, reader: str | None = None) -> list[dict[str, Any]] | None:
        """What happened to each choice of an answer, or to the request of a number; ``None``: nothing is known, or
        nothing that a ``reader`` owns."""
        request_ids = self._names.get(name) or ([int(name)] if name.isascii() and name.isdigit() else [])
        found = {
            request_id: self._events[request_id]
            for request_id in request_ids
            if request_id in self._events and (reader is None or self._owners.get(request_id) == reader)
        }
        return [
            explain(events, (other for number, other in self._events.items() if number != request_id))
            for request_id, events in found.items()
        ] or None


class KVEventRing:
    """The latest events of the cache, numbered by this server."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_KV_EVENTS)
        self._last = 0

    def add(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            self._append({**msgspec.to_builtins(event)})

    def clear(self) -> None:
        """The engine process is gone, and all that it cached."""
        self._append({"type": "cleared"})

    def _append(self, event: dict[str, Any]) -> None:
        self._last += 1
        self._events.append({**event, "number": self._last})

    def after(self, number: int) -> dict[str, Any]:
        """Events with greater numbers, the first of them, and whether some before those are lost."""
        first = self._events[0]["number"] if self._events else self._last + 1
        skipped = max(0, number + 1 - first)
        chosen = [
            self._events[index] for index in range(skipped, min(skipped + MAX_KV_EVENTS_AT_ONCE, len(self._events)))
        ]
        return {"events": chosen, "last": self._last, "is_complete": number + 1 >= first}
