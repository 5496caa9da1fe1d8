"""Events of recent requests and of the KV cache, kept in the front process across engine restarts."""

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
    """Events of the latest ``MAX_REQUESTS`` requests, by response id."""

    def __init__(self) -> None:
        self._events: OrderedDict[int, list[Event]] = OrderedDict()
        self._names: OrderedDict[str, list[int]] = OrderedDict()
        self._names_by_id: OrderedDict[int, str] = OrderedDict()
        self._owners: OrderedDict[int, str] = OrderedDict()

    def add(self, events: Iterable[Event]) -> None:
        """Record a step's events."""
        for event in events:
            known = self._events.get(event.request_id)
            if known is None:
                if event.kind != "arrived":
                    continue  # the request was already dropped
                known = self._events[event.request_id] = []
                if len(self._events) > MAX_REQUESTS:
                    self._events.popitem(last=False)
            if len(known) < MAX_EVENTS_EACH or event.kind == "ended":
                known.append(event)

    def own(self, request_id: int, owner: str) -> None:
        """Record the owner of a request, the name of an API key."""
        self._owners[request_id] = owner
        if len(self._owners) > MAX_REQUESTS:
            self._owners.popitem(last=False)

    def name(self, name: str, request_ids: Sequence[int]) -> None:
        """Register the response id ``name`` for these requests."""
        self._names[name] = list(request_ids)
        if len(self._names) > MAX_REQUESTS:
            self._names.popitem(last=False)
        for request_id in request_ids:
            self._names_by_id[request_id] = name
            if len(self._names_by_id) > MAX_REQUESTS:
                self._names_by_id.popitem(last=False)

    def name_of(self, request_id: int) -> str:
        """The response id registered for a request, or ""."""
        return self._names_by_id.get(request_id, "")

    def events_of(self, request_id: int) -> Sequence[Event]:
        """The recorded events of a request."""
        return self._events.get(request_id, ())

    def report(self, name: str, reader: str | None = None) -> list[dict[str, Any]] | None:
        """The timeline of each choice of the response ``name``, or of request number ``name``. ``None`` if unknown,
        or if not owned by ``reader`` (when given)."""
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
    """The latest ``MAX_KV_EVENTS`` KV-cache events, numbered from 1."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_KV_EVENTS)
        self._last = 0

    def add(self, events: Iterable[KVEvent], rank: int = 0) -> None:
        """Record events of the engine with this data-parallel rank; those of rank 0 do not name it."""
        for event in events:
            self._append({**msgspec.to_builtins(event), **({"rank": rank} if rank else {})})

    def clear(self, rank: int = 0) -> None:
        """Record that the cache was lost with its engine process."""
        self._append({"type": "cleared", **({"rank": rank} if rank else {})})

    def _append(self, event: dict[str, Any]) -> None:
        self._last += 1
        self._events.append({**event, "number": self._last})

    def after(self, number: int) -> dict[str, Any]:
        """The first ``MAX_KV_EVENTS_AT_ONCE`` events with greater numbers, and whether none before them was dropped."""
        first = self._events[0]["number"] if self._events else self._last + 1
        skipped = max(0, number + 1 - first)
        chosen = [
            self._events[index] for index in range(skipped, min(skipped + MAX_KV_EVENTS_AT_ONCE, len(self._events)))
        ]
        return {"events": chosen, "last": self._last, "is_complete": number + 1 >= first}
