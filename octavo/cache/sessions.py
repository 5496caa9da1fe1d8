"""Conversations that requests are turns of: how much of each the prefix cache has.

A session is named by its client, within an API key and a salt. Of each the end of the latest turn is known. There are
at most as many as the cache has blocks: beyond that, the key with the most loses the one that it used longest ago.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from octavo.cache.node import Node, Place
from octavo.telemetry.cache_view import SessionView
from octavo.types import Request

K = TypeVar("K")
V = TypeVar("V")


class ByOwner(Generic[K, V]):
    """Items of several API keys, in the order in which each was put last."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[K, V]] = {}
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def put(self, owner: str, key: K, value: V) -> None:
        """Add an item, or move it behind the owner's others."""
        own = self._of.setdefault(owner, OrderedDict())
        self._num_items += key not in own
        own[key] = value
        own.move_to_end(key)

    def get(self, owner: str, key: K) -> V | None:
        own = self._of.get(owner)
        return None if own is None else own.get(key)

    def remove(self, owner: str, key: K) -> V:
        """Remove and return an item, which must be there."""
        own = self._of[owner]
        value = own.pop(key)
        self._num_items -= 1
        if not own:
            del self._of[owner]
        return value

    def surplus(self) -> tuple[str, K]:
        """The oldest item of the owner with the most; there must be one."""
        owner = max(self._of, key=lambda name: len(self._of[name]))
        return owner, next(iter(self._of[owner]))

    def items(self, owner: str) -> Iterator[tuple[K, V]]:
        """Those of an owner, the last first."""
        return reversed(self._of.get(owner, OrderedDict()).items())

    def counts(self) -> dict[str, int]:
        """The number of items of each owner that has some."""
        return {owner: len(own) for owner, own in self._of.items()}


class Session:
    """The latest turn of a conversation, and counts of all of its turns."""

    __slots__ = ("_places", "kept_until", "num_found", "num_requests", "num_tokens", "request_id", "used")

    def __init__(self) -> None:
        self._places: list[Place] = []
        self.num_tokens = 0
        """Of the latest turn, prompt and answer, in full blocks."""
        self.request_id = -1
        """Of the latest turn."""
        self.num_requests = 0
        self.num_found = 0
        """Prompt tokens of all turns that the prefix cache had."""
        self.used = 0.0
        """When the latest turn ended."""
        self.kept_until = 0.0
        """When its blocks lose their preference."""

    @property
    def ends(self) -> list[Node]:
        """In each KV group, the last node of the latest turn that is still in the tree; none before the first."""
        return [place.node for place in self._places]

    def end_at(self, ends: list[Node]) -> None:
        """The latest turn ends with the nodes ``ends`` from now on."""
        self._places = [end.note_place() for end in ends]


class Sessions:
    """The sessions of a cache. ``find`` and ``forget`` look at all of an API key's; the others cost O(1) for each."""

    def __init__(self, most: int, block_size: int, clock: Callable[[], float]) -> None:
        self.num_queries = 0
        """Tokens of the turns before: those that the next turn's prompt can repeat."""
        self.num_hits = 0
        """Of those, tokens that it found in the prefix cache."""
        self._most = most
        self._block_size = block_size
        self._clock = clock
        self._known = ByOwner[tuple[str, str], Session]()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, request: Request) -> Session | None:
        """The session that ``request`` is a turn of, if it had a turn before."""
        return self._known.get(request.owner, (request.session, request.cache_salt)) if request.session else None

    def note_found(self, num_before: int, num_found: int) -> None:
        """A turn found ``num_found`` tokens of its prompt, and the turn before had ``num_before``."""
        self.num_queries += num_before
        self.num_hits += min(num_before, num_found)

    def note_turn(self, request: Request, ends: list[Node], num_found: int) -> list[Node]:
        """Record that a turn ends with the nodes ``ends``, of which ``num_found`` tokens were found; returns the nodes
        that the turn before ended with, if any."""
        session = self.of(request) or Session()
        if session.request_id != request.id:  # not one that was preempted, and goes on
            session.request_id = request.id
            session.num_requests += 1
            session.num_found += num_found
        before, session.used = session.ends, self._clock()
        session.end_at(ends)
        session.num_tokens = ends[0].depth * self._block_size
        session.kept_until = max(session.kept_until, session.used + request.cache_ttl)
        self._known.put(request.owner, (request.session, request.cache_salt), session)
        if len(self._known) > self._most:
            self._known.remove(*self._known.surplus())
        return before

    def find(self, owner: str, name: str) -> list[Session]:
        """Those of this name, one for each salt, the latest first."""
        return [session for key, session in self._known.items(owner) if key[0] == name]

    def forget(self, owner: str, name: str) -> list[list[Node]]:
        """Know those of this name no more; returns what each ended with."""
        keys = [key for key, _ in self._known.items(owner) if key[0] == name]
        return [self._known.remove(owner, key).ends for key in keys]

    def views(self, owner: str | None, most: int) -> list[SessionView]:
        """Those of an API key, or of all, used last: at most ``most``."""
        now = self._clock()
        owners = self._known.counts() if owner is None else [owner]
        found = [
            (session, name, key) for name in owners for key, session in itertools.islice(self._known.items(name), most)
        ]
        latest = sorted(found, key=lambda entry: -entry[0].used)[:most]
        return [self._view(session, name, key[0], now) for session, name, key in latest]

    def _view(self, session: Session, owner: str, name: str, now: float) -> SessionView:
        end, seconds = live(session.ends[0]), max(0.0, session.kept_until - now)
        pinned = end
        while pinned.parent is not None and pinned.keeper is None:
            pinned = pinned.parent
        return SessionView(
            name,
            owner,
            session.num_requests,
            session.num_tokens,
            end.depth * self._block_size,
            pinned.depth * self._block_size if seconds else 0,
            session.num_found,
            round(now - session.used, 3),
            round(seconds, 3),
        )


def live(end: Node) -> Node:
    """The last node of the path to ``end`` with a block, which behind a window may be none; the root if none has."""
    while end.parent is not None and end.block < 0:
        end = end.parent
    return end
