"""How much each API key may use: requests and tokens a minute, as buckets that fill steadily.

A token bucket as in ITU-T I.371, but tokens are known only when they are there: an account goes into debt and is
closed until it is out of it, so over time nobody gets more than the rate.
"""

from __future__ import annotations

import math
import time

from octavo.errors import QueueFull

MINUTE = 60.0


class Bucket:
    """Holds a minute's worth, full at first."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._time = 0.0

    def wait(self, now: float, needed: float) -> float:
        """Seconds until ``needed`` is in it; 0 if it is."""
        self._fill(now)
        return max(0.0, (needed - self._level) * MINUTE / self.per_minute)

    def take(self, now: float, amount: float) -> None:
        """Take ``amount`` out; it may then hold less than nothing."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        if self._time:
            self._level = min(self.per_minute, self._level + (now - self._time) * self.per_minute / MINUTE)
        self._time = now


class Account:
    """What one API key uses."""

    def __init__(self, requests_per_minute: int | None = None, tokens_per_minute: int | None = None) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.limit(requests_per_minute, tokens_per_minute)

    def limit(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Set the rates; ``None`` is without bounds."""
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute)

    def admit(self) -> None:
        """Count one request. Raises ``QueueFull`` with the seconds to wait when it is one too many."""
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
        """Count tokens of a prompt or of an answer."""
        self.num_tokens += num_tokens
        if self._tokens is not None:
            self._tokens.take(time.monotonic(), num_tokens)
