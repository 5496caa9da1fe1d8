"""A bound on what unfinished requests hold together, over all connections.

Each holder has a share. When all shares pass the limit, the largest one is given up, so a client with a small
request is served however much others send without an end.
"""

from __future__ import annotations

from collections.abc import Callable


class ByteBudget:
    """Bytes that wait for the rest of their request, at most ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._shares: set[Share] = set()
        """Those that may be given up."""

    def share(self, give_up: Callable[[], None]) -> Share:
        """An empty share. ``give_up`` is called once, if it must be freed; its bytes no longer count then."""
        return Share(self, give_up)

    def _resize(self, share: Share, num_bytes: int) -> None:
        self.num_bytes += num_bytes - share.num_bytes
        share.num_bytes = num_bytes
        if num_bytes and not share.is_complete:
            self._shares.add(share)
        else:
            self._shares.discard(share)
        while self.num_bytes > self.limit and self._shares:
            largest = max(self._shares, key=lambda one: one.num_bytes)
            largest.is_given_up = True
            self._resize(largest, 0)
            largest._give_up()


class Share:
    """What one unfinished request holds."""

    def __init__(self, budget: ByteBudget, give_up: Callable[[], None]) -> None:
        self.num_bytes = 0
        self.is_given_up = False
        self.is_complete = False
        self._budget = budget
        self._give_up = give_up

    def resize(self, num_bytes: int) -> None:
        """Say how much it is now; nothing when the request is whole, or gone."""
        if not self.is_given_up and num_bytes != self.num_bytes:
            self._budget._resize(self, num_bytes)

    def settle(self) -> None:
        """The request is whole: it counts until it is worked off, and is no longer given up for others."""
        self.is_complete = True
        self._budget._shares.discard(self)
