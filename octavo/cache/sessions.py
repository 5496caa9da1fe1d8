"""Conversations that requests are turns of: how much of each the prefix cache has.

A session is named by its client, within an API key and a salt. Of each the end of the latest turn is known, and of up
to three others that no later turn continues: an agent's helpers have its name, and conversations of their own. There
are at most as many sessions as the cache has blocks: beyond that, the key with the most loses the one that it used
longest ago.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

from octavo.cache.node import Node
from octavo.telemetry.cache_view import SessionView
from octavo.types import Request, Sequence

MAX_BRANCHES = 4
"""Turns of a session that none continues: the last one of an agent, and those of its helpers."""

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


class Turn:
    """The end of a turn that no later turn continues."""

    __slots__ = ("_places", "dp_rank", "num_blocks", "slot")

    def __init__(self, ends: list[Node], slot: int, dp_rank: int) -> None:
        self._places = [end.note_place() for end in ends]
        self.dp_rank: int = dp_rank
        """The rank in whose tree they are."""
        self.num_blocks: int = ends[0].depth
        """Of prompt and answer, as far as they are full."""
        self.slot: int = slot
        """Its number within the session, that of the turn that it continues."""

    @property
    def ends(self) -> list[Node]:
        """In each KV group, its last node that is still in the tree."""
        return [place.node for place in self._places]

    def is_continued(self, path: Collection[Node], num_blocks: int) -> bool:
        """Whether a turn of ``num_blocks``, of which those of ``path`` are cached, goes on from this one: it repeats
        half of it, or all that is left of it."""
        node = last = self.ends[0]
        while node.parent is not None and node not in path:
            node = node.parent
        return 2 * node.depth >= self.num_blocks or (node is last and num_blocks >= self.num_blocks)


class Session:
    """A conversation: its last turn, and those of helpers that have the same name; and counts of all turns."""

    __slots__ = ("kept_until", "num_found", "num_requests", "request_id", "turns", "used")

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        """At most ``MAX_BRANCHES``, the latest first."""
        self.request_id = -1
        """Of the latest."""
        self.num_requests = 0
        self.num_found = 0
        """Prompt tokens of all turns that the prefix cache had."""
        self.used = 0.0
        """When the latest turn ended."""
        self.kept_until = 0.0
        """When its blocks lose their preference."""

    def continued(self, end: Node, num_blocks: int) -> list[Turn]:
        """The turns that one of ``num_blocks``, of which those up to ``end`` are cached, goes on from."""
        path = set[Node]()
        node: Node | None = end
        while node is not None:
            path.add(node)
            node = node.parent
        return [turn for turn in self.turns if turn.is_continued(path, num_blocks)]

    def free_slot(self) -> int:
        """One for a turn that goes on from none: that of the oldest if all are taken."""
        if len(self.turns) == MAX_BRANCHES:
            return self.turns.pop().slot
        taken = [turn.slot for turn in self.turns]
        return next(slot for slot in range(MAX_BRANCHES) if slot not in taken)


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

    def note_found(self, seq: Sequence) -> tuple[int, int]:
        """Record what a turn found that has just adopted its cached blocks; returns its number, and the tokens of the
        turn before that it could repeat; 0 and 0 without a session."""
        request, num_prompt = seq.request, seq.num_prompt_tokens
        if not request.session:
            return 0, 0
        session = self.of(request)
        if session is None:
            return 1, 0
        before = session.continued(seq.groups[0].published, num_prompt // self._block_size)
        num_before = min(before[0].num_blocks * self._block_size, num_prompt - 1) if before else 0
        self.num_queries += num_before
        self.num_hits += min(num_before, seq.num_computed_tokens)
        return session.num_requests + 1, num_before

    def note_turn(self, seq: Sequence) -> tuple[Turn, list[Turn]]:
        """Record the end of a turn, which still holds its blocks; returns it, and those that it goes on from."""
        request, ends = seq.request, [held.published for held in seq.groups]
        session = self.of(request) or Session()
        if session.request_id != request.id:  # not one that was preempted, and goes on
            session.request_id = request.id
            session.num_requests += 1
            session.num_found += seq.num_cached_tokens
        before = session.continued(ends[0], ends[0].depth)
        session.turns = [turn for turn in session.turns if turn not in before]
        turn = Turn(ends, before[0].slot if before else session.free_slot(), seq.dp_rank)
        session.turns.insert(0, turn)
        session.used = self._clock()
        session.kept_until = max(session.kept_until, session.used + request.cache_ttl)
        self._known.put(request.owner, (request.session, request.cache_salt), session)
        if len(self._known) > self._most:
            self._known.remove(*self._known.surplus())
        return turn, before

    def find(self, owner: str, name: str) -> list[Session]:
        """Those of this name, one for each salt, the latest first."""
        return [session for key, session in self._known.items(owner) if key[0] == name]

    def forget(self, owner: str, name: str) -> list[Session]:
        """As ``find``; they are not known any more."""
        keys = [key for key, _ in self._known.items(owner) if key[0] == name]
        return [self._known.remove(owner, key) for key in keys]

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
        turn, seconds = max(session.turns, key=lambda turn: turn.num_blocks), max(0.0, session.kept_until - now)
        end = live(turn.ends[0])
        pinned = end
        while seconds and pinned.parent is not None and pinned.keeper is None:
            pinned = pinned.parent
        return SessionView(
            name,
            owner,
            session.num_requests,
            turn.num_blocks * self._block_size,
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
