"""Rate limits per API key, requests and tokens per minute, as token buckets; and shares of what all keys have together.

A token bucket as in ITU-T I.371. The cost of a request is known only afterwards, so an account may go into debt; it is
then blocked until the debt is paid, so that the average rate never exceeds the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from octavo.errors import QueueFull

MINUTE = 60.0
LEAST_SHARE = 8
"""Items that each API key may hold, even if there are more keys than items."""


def share_of(limit: int, num_holders: int, least: int = LEAST_SHARE) -> int:
    """What an API key may hold beyond a ``limit`` of all, when ``num_holders`` keys hold something."""
    return min(limit, max(least, limit // max(1, num_holders)))


def has_share(held: Mapping[str, int], owner: str, count: int, limit: int) -> bool:
    """Whether ``owner`` may hold ``count`` more, when each API key holds ``held``.

    A key may hold all of ``limit`` while there is room. When there is none, each key still gets its share, so that one
    that took everything delays no other. So with ``n`` keys, all hold at most ``limit * (1 + 1/2 + ... + 1/n)``, or
    ``LEAST_SHARE`` each if that is more.
    """
    num_holders = len(held.keys() | {owner})
    return sum(held.values()) + count <= limit or held.get(owner, 0) + count <= share_of(limit, num_holders)


class Bucket:
    """A token bucket with a capacity of one minute; initially full."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._time = 0.0

    def wait(self, now: float, needed: float) -> float:
        """Seconds until the level reaches ``needed``; 0 if it already has."""
        self._fill(now)
        return max(0.0, (needed - self._level) * MINUTE / self.per_minute)

    def take(self, now: float, amount: float) -> None:
        """Remove ``amount``; the level may become negative."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        if self._time:
            self._level = min(self.per_minute, self._level + (now - self._time) * self.per_minute / MINUTE)
        self._time = now


class Account:
    """Usage and rate limits of one API key."""

    def __init__(self, requests_per_minute: int | None = None, tokens_per_minute: int | None = None) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.limit(requests_per_minute, tokens_per_minute)

    def limit(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Set the rates; ``None`` = unlimited."""
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute)

    def admit(self) -> None:
        """Count one request. Raises ``QueueFull`` with ``retry_after`` when over a limit."""
        now = time.monotonic()
        for bucket, what, needed in ((self._requests, "requests", 1.0), (self._tokens, "tokens", 1.0)):
            wait = 0.0 if bucket is None else bucket.wait(now, needed)
            if bucket is not None and wait > 0:
                message = f"This API key may use {bucket.per_minute:g} {what} a minute; try again later."
                raise QueueFull(message, retry_after=math.ceil(wait))
        if self._requests is not None:
            self._requests.take(now, 1)
        self.num_requests += 1

    def charge(self, num_tokens: int) -> None:
        """Count tokens of a prompt or of an output."""
        self.num_tokens += num_tokens
        if self._tokens is not None:
            self._tokens.take(time.monotonic(), num_tokens)
