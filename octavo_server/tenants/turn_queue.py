"""A few places for slow work, given to API keys in turn.

Work that is bounded by a number of places has a queue. In a plain one, the requests of one API key would delay those of
all others; here each key has a queue of its own, and they are served round-robin.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TurnQueue(Generic[T]):
    """Items by API key: first in, first out for each, and the keys in turn."""

    def __init__(self) -> None:
        self._by_owner: dict[str, deque[T]] = {}
        """In the order of turns; no queue is empty."""

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def push(self, owner: str, item: T) -> None:
        self._by_owner.setdefault(owner, deque()).append(item)

    def pop(self, may_go: Callable[[str], bool] = lambda owner: True) -> tuple[str, T] | None:
        """The next item, with its owner, of those owners that may have a turn."""
        owner = next(filter(may_go, self._by_owner), None)
        if owner is None:
            return None
        queue = self._by_owner.pop(owner)
        item = queue.popleft()
        if queue:
            self._by_owner[owner] = queue  # at the end
        return owner, item


class Places:
    """At most ``num_places`` at a time, and at most ``num_each`` of one API key."""

    def __init__(self, num_places: int, num_each: int | None = None) -> None:
        self.num_places = num_places
        self.num_each = num_each or num_places
        self._num_free = num_places
        self._taken: Counter[str] = Counter()
        self._waiting: TurnQueue[asyncio.Future[None]] = TurnQueue()

    @contextlib.asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and have it until the context exits."""
        if self._num_free and self._may_go(owner):
            self._take(owner)
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.push(owner, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was given the place at the same time
                    self._leave(owner)
                raise
        try:
            yield
        finally:
            self._leave(owner)

    def _may_go(self, owner: str) -> bool:
        return self._taken[owner] < self.num_each

    def _take(self, owner: str) -> None:
        self._num_free -= 1
        self._taken[owner] += 1

    def _leave(self, owner: str) -> None:
        self._num_free += 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        while self._num_free and (found := self._waiting.pop(self._may_go)) is not None:
            following, turn = found
            if not turn.done():  # skip cancelled ones
                self._take(following)
                turn.set_result(None)
