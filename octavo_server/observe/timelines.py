"""Events of recent requests and of the KV cache, kept in the front process across engine restarts."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from octavo.cache.kv_events import KVEvent
from octavo.telemetry.explain import explain
from octavo.telemetry.request_events import Event

MAX_REQUESTS = 2000
MAX_EVENTS_EACH = 1000
MAX_KV_EVENTS = 100_000
MAX_KV_EVENTS_AT_ONCE = 1000


class _Kept:
    """What is known of a request."""

    __slots__ = ("events", "name", "owner", "session")

    def __init__(self, owner: str, session: str) -> None:
        self.owner = owner
        self.session = session
        self.name = ""
        self.events: list[Event] = []


class Timelines:
    """Events of ``MAX_REQUESTS`` requests, by response id. The oldest of the API key with the most is dropped first."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._ids_of: dict[str, OrderedDict[int, None]] = {}
        """Requests by owner, oldest first."""
        self._names: dict[str, list[int]] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Record a step's events."""
        for event in events:
            known = self._kept.get(event.request_id)
            if known is None:
                if event.kind != "arrived":
                    continue  # the request was already dropped
                known = self._keep(event.request_id)
            if len(known.events) < MAX_EVENTS_EACH or event.kind == "ended":
                known.events.append(event)

    def own(self, request_id: int, owner: str, session: str = "") -> None:
        """Record the owner of a new request, the name of an API key, and its session."""
        self._keep(request_id, owner, session)

    def _keep(self, request_id: int, owner: str = "", session: str = "") -> _Kept:
        kept = self._kept[request_id] = _Kept(owner, session)
        self._ids_of.setdefault(owner, OrderedDict())[request_id] = None
        if len(self._kept) > MAX_REQUESTS:
            largest = max(self._ids_of, key=lambda name: len(self._ids_of[name]))
            self._drop(next(iter(self._ids_of[largest])))
        return kept

    def _drop(self, request_id: int) -> None:
        kept = self._kept.pop(request_id)
        del self._ids_of[kept.owner][request_id]
        if not self._ids_of[kept.owner]:
            del self._ids_of[kept.owner]
        if request_id in (named := self._names.get(kept.name, [])):
            named.remove(request_id)
            if not named:
                del self._names[kept.name]

    def name(self, name: str, request_ids: Sequence[int]) -> None:
        """Register the response id ``name`` for these requests."""
        known = [request_id for request_id in request_ids if request_id in self._kept]
        if known:
            self._names[name] = known
        for request_id in known:
            self._kept[request_id].name = name

    def name_of(self, request_id: int) -> str:
        """The response id registered for a request, or ""."""
        kept = self._kept.get(request_id)
        return kept.name if kept else ""

    def events_of(self, request_id: int) -> Sequence[Event]:
        """The recorded events of a request."""
        kept = self._kept.get(request_id)
        return kept.events if kept else ()

    def report(self, name: str, reader: str | None = None) -> list[dict[str, Any]] | None:
        """The timeline of each choice of the response ``name``, or of request number ``name``. ``None`` if unknown,
        or if not owned by ``reader`` (when given)."""
        request_ids = self._names.get(name) or ([int(name)] if name.isascii() and name.isdigit() else [])
        found = {
            request_id: kept
            for request_id in request_ids
            if (kept := self._kept.get(request_id)) and kept.events and reader in (None, kept.owner)
        }
        reports = []
        for request_id, kept in found.items():
            others = (other.events for number, other in self._kept.items() if number != request_id)
            reports.append(report := explain(kept.events, others))
            if report["session"]:
                report["session"]["id"] = kept.session
        return reports or None


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
