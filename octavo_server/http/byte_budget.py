"""A limit on the memory of incomplete requests, over all connections.

Each incomplete request has a share. When the sum exceeds the limit, the largest share of the API key that holds most is
revoked, so that clients with small requests are served however much others send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class ByteBudget:
    """Limits the bytes held by incomplete requests to ``limit`` in total."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._shares: set[Share] = set()
        """Non-empty shares of incomplete requests, which may be revoked."""

    def share(self, give_up: Callable[[], None], owner: str = "") -> Share:
        """A new empty share of the API key ``owner``. ``give_up`` is called at most once, when the share is revoked and
        no longer counts."""
        return Share(self, give_up, owner)

    def _resize(self, share: Share, num_bytes: int) -> None:
        self.num_bytes += num_bytes - share.num_bytes
        share.num_bytes = num_bytes
        if num_bytes and not share.is_complete:
            self._shares.add(share)
        else:
            self._shares.discard(share)
        while self.num_bytes > self.limit and self._shares:
            totals: Counter[str] = Counter()
            for one in self._shares:
                totals[one.owner] += one.num_bytes
            largest = max(self._shares, key=lambda one: (totals[one.owner], one.num_bytes))
            largest.is_given_up = True
            self._resize(largest, 0)
            largest._give_up()


class Share:
    """The bytes held by one request."""

    def __init__(self, budget: ByteBudget, give_up: Callable[[], None], owner: str) -> None:
        self.owner = owner
        self.num_bytes = 0
        self.is_given_up = False
        self.is_complete = False
        self._budget = budget
        self._give_up = give_up

    def resize(self, num_bytes: int) -> None:
        """Set the share's size; without effect once it was revoked."""
        if not self.is_given_up and num_bytes != self.num_bytes:
            self._budget._resize(self, num_bytes)

    def settle(self) -> None:
        """Mark the request as complete: it still counts, but can no longer be revoked."""
        self.is_complete = True
        self._budget._shares.discard(self)
