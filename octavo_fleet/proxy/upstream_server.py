"""One of the servers that requests are forwarded to: whether it is up, and what a router wants to know of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from urllib.parse import urlsplit

from octavo.errors import ConfigError
from octavo_fleet.proxy.connections import ConnectionFailed, Connections
from octavo_fleet.routing.prefixes import PromptQuery, RemotePrefixes

HEALTH_SECONDS = 5.0
"""Time that a health check may take."""
CHECK_SECONDS = 1.0
CHECK_SECONDS_DOWN = 0.2
MAX_SLOW_CHECKS = 3
"""Health checks in a row that time out until the server counts as down: a busy one may be slow to respond."""
MAX_HEALTH_BYTES = 1 << 20
"""Longest answer to a health check that is read."""
PIECE_BYTES = 512
"""Of a prompt's text, whose pieces are taken for blocks: there is no tokenizer here."""
PATIENCE_SECONDS = 600.0
"""For which a server that was sent a prompt counts as having it cached."""

logger = logging.getLogger("octavo.server")


class UpstreamServer:
    """A server, with pooled connections to it."""

    def __init__(self, url: str, setting: str = "upstream", max_slow_checks: int = MAX_SLOW_CHECKS) -> None:
        """Raises ``ConfigError``, which names the ``setting``, for an invalid URL."""
        self.url = valid_url(url, setting)
        self.connections = Connections(self.url)
        self.is_up = False
        self.last_answer = time.monotonic()
        self.num_live = 0
        """Requests that were sent there and have not ended."""
        self.num_slow_checks = 0
        self._max_slow_checks = max_slow_checks
        self._prefixes = RemotePrefixes(PATIENCE_SECONDS)

    # --- what routers ask ---

    def num_live_of(self, tenant: str) -> int:
        """Requests are not told apart."""
        return 0

    def num_cached_blocks(self, query: PromptQuery) -> int:
        return self._prefixes.num_cached_blocks(query, PIECE_BYTES)

    def note_sent(self, query: PromptQuery) -> None:
        """A prompt is sent there."""
        self._prefixes.note_sent(query, PIECE_BYTES, time.monotonic())

    # --- life ---

    async def check(self) -> None:
        """Send a health check; any answer but a server error counts, as not every server has the path."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self.connections.request("GET", "health") as response:
                await response.read_all(MAX_HEALTH_BYTES)
                is_up = response.status < 500
        except TimeoutError:
            self.num_slow_checks += 1
            is_up = self.is_up and self.num_slow_checks < self._max_slow_checks
        except ConnectionFailed:
            is_up = False
        else:
            self.num_slow_checks = 0
        if is_up and not self.num_slow_checks:
            self.last_answer = time.monotonic()
        if is_up != self.is_up:
            logger.info("the upstream at %s is %s", self.url, "up" if is_up else "down")
            if not is_up:
                self._prefixes = RemotePrefixes(PATIENCE_SECONDS)  # its cache may be gone
        self.is_up = is_up
        self._prefixes.update(b"", time.monotonic())

    async def watch(self, check_now: asyncio.Event) -> None:
        """Check it for ever, also as soon as ``check_now`` is set."""
        while True:
            check_now.clear()
            seconds = CHECK_SECONDS if self.is_up else CHECK_SECONDS_DOWN
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(check_now.wait(), seconds)
            await self.check()

    def close(self) -> None:
        self.connections.close()


def valid_url(text: str, setting: str = "upstream") -> str:
    """The URL that paths are relative to. Raises ``ConfigError``."""
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise ConfigError(f"{setting}: {text!r} is not a URL such as http://127.0.0.1:8001")
    # The API's paths begin with /v1, which clients' base URLs contain and this one need not.
    return text.rstrip("/").removesuffix("/v1") + "/"
