"""The upstream server: whether it is up, pooled connections to it, and the requests that it has from this server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from octavo.config import ServeConfig
from octavo.errors import ConfigError, QueueFull, RequestError, Unavailable
from octavo.telemetry.counts import Condition
from octavo.telemetry.metrics import Metrics
from octavo_fleet.proxy.connections import (
    Connection,
    ConnectionFailed,
    Connections,
    Headers,
    InvalidResponse,
    ServerSilent,
)
from octavo_fleet.proxy.upstream_process import UpstreamProcess
from octavo_server.http.errors import RETRY_AFTER_SECONDS
from octavo_server.tenants.api_keys import has_share
from octavo_server.tenants.places import Places

MAX_NUM_SEQS = 1024
"""Requests that the upstream has at once, if ``max_num_seqs`` is not set."""
ATTEMPTS = 3
RETRY_PAUSE = 0.1
"""Seconds before the first retry; each further pause is twice as long."""
HEALTH_SECONDS = 5.0
"""Time that a health check may take."""
CHECK_SECONDS = 1.0
CHECK_SECONDS_DOWN = 0.2
MAX_SLOW_CHECKS = 3
"""Health checks in a row that time out until the upstream counts as down: a busy one may be slow to respond."""
MAX_HEALTH_BYTES = 1 << 20
"""Longest answer to a health check that is read."""
DRAIN_POLL_SECONDS = 0.02
MAX_REQUEST_BYTES = 256 << 20
"""Of the bodies of all requests that have not ended. One of each API key is always accepted."""
MAX_HELD_BYTES = 256 << 10
"""A body that is no stream is relayed as a whole up to this size, so that it can be requested again; else in pieces."""

logger = logging.getLogger("octavo.server")


class UpstreamUnavailable(Unavailable):
    """The upstream server is down, or did not answer."""

    code = "upstream_unavailable"

    def __init__(self) -> None:
        super().__init__("The upstream server does not answer. Try again shortly.", retry_after=RETRY_AFTER_SECONDS)


class UpstreamFailed(RequestError):
    """The upstream sent no valid response, or failed after the first byte of one."""

    status = 502
    type = "server_error"
    code = "upstream_failed"


class UpstreamSilent(RequestError):
    """The upstream accepted the request, and then sent nothing for too long."""

    status = 504
    type = "timeout_error"
    code = "upstream_timeout"

    def __init__(self) -> None:
        super().__init__("The upstream server did not go on with this request in time.")


def failure_of(error: ConnectionFailed) -> RequestError:
    """What a client is told of a request that was not finished."""
    if isinstance(error, ServerSilent):
        return UpstreamSilent()
    if isinstance(error, InvalidResponse):
        return UpstreamFailed("The upstream server sent a response that is not valid.")
    return UpstreamFailed("The upstream server failed before this response was finished.")


class UpstreamAnswer:
    """The head of the upstream's response, and its body."""

    def __init__(self, connection: Connection) -> None:
        self.status = connection.status
        self.headers = connection.headers
        kinds = [value for name, value in connection.headers if name.lower() == b"content-type"]
        self.is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        self.read = connection.read
        self.first = b""
        """The first piece of a stream; of another response the body, or the beginning of a long one."""
        self.last = b""
        """The piece of a stream that was relayed last."""
        self.is_whole = False
        """Whether ``first`` is the body of a response that is no stream."""

    async def receive_first(self) -> None:
        """Receive what can be requested again."""
        self.first = await self.read()
        if not self.is_stream:
            pieces, num_bytes = [self.first], len(self.first)
            while pieces[-1] and num_bytes <= MAX_HELD_BYTES:
                pieces.append(await self.read())
                num_bytes += len(pieces[-1])
            self.first, self.is_whole = b"".join(pieces), not pieces[-1]


class Upstream:
    """Takes the place of an engine in the serving process: it starts, drains, and knows the live requests."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ``ConfigError`` for an invalid URL or command."""
        settings = config.server
        self.url = _valid_url(settings.upstream or "")
        self.metrics = Metrics(urlsplit(self.url).netloc, config)
        self.metrics.condition = lambda: Condition(self.num_live, self.is_ready, self.seconds_since_progress)
        self.failure: str | None = None
        self._live: Counter[str] = Counter()
        """Accepted requests that have not ended, by API key."""
        self._num_request_bytes: Counter[str] = Counter()
        """Of their bodies."""
        self._room = (config.scheduler.max_num_seqs or MAX_NUM_SEQS) + settings.max_num_queued_reqs
        self._slots = Places(config.scheduler.max_num_seqs or MAX_NUM_SEQS)
        self._exchanges: set[asyncio.Task[None]] = set()
        self._process = None
        if settings.upstream_command is not None:
            self._process = UpstreamProcess(settings.upstream_command, settings.engine_timeout)
        self._connections = Connections(self.url)
        self._is_up = False
        self._last_answer = time.monotonic()
        self._num_slow_checks = 0
        self._check_now = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self.is_draining = False
        self.is_stopped = False
        """Whether the drain is over, so that requests that are cancelled end with an error."""

    # --- life ---

    async def start(self) -> None:
        """Start the managed upstream, if any, and wait until it is up; another upstream may come up later.

        Raises ``OctavoError`` if the managed one ends first.
        """
        await self._check()
        if self._process is not None:
            if self._is_up:
                raise ConfigError(f"upstream_command: another server answers at {self.url} already")
            await self._process.start(self._wait_up)
        elif not self._is_up:
            logger.warning("the upstream at %s is down; requests get 503 until it is up", self.url)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, timeout: float) -> None:
        """Drain: reject new requests, wait up to ``timeout`` seconds for live ones, then end the managed upstream."""
        self.is_draining = True
        deadline = time.monotonic() + timeout
        while self.num_live and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self.is_stopped = True
        for task in self._exchanges:
            task.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()
        self._connections.close()

    # --- state ---

    @property
    def num_live(self) -> int:
        """Accepted requests that have not ended."""
        return self._live.total()

    @property
    def is_ready(self) -> bool:
        return self._is_up and not self.is_draining

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the upstream last answered."""
        return time.monotonic() - self._last_answer

    async def _watch(self) -> None:
        while True:
            self._check_now.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._check_now.wait(), CHECK_SECONDS if self._is_up else CHECK_SECONDS_DOWN)
            await self._check()
            if self._process is not None and await self._process.watch(self.seconds_since_progress):
                self._last_answer = time.monotonic()

    async def _wait_up(self) -> None:
        while not self._is_up:
            await asyncio.sleep(CHECK_SECONDS_DOWN)
            await self._check()

    async def _check(self) -> None:
        """Send a health check; any answer but a server error counts, as not every server has the path."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self._connections.request("GET", "health") as response:
                await response.read_all(MAX_HEALTH_BYTES)
                is_up = response.status < 500
        except TimeoutError:
            self._num_slow_checks += 1
            is_up = self._is_up and self._num_slow_checks < MAX_SLOW_CHECKS
        except ConnectionFailed:
            is_up = False
        else:
            self._num_slow_checks = 0
        if is_up and not self._num_slow_checks:
            self._last_answer = time.monotonic()
        if is_up != self._is_up:
            logger.info("the upstream at %s is %s", self.url, "up" if is_up else "down")
        self._is_up = is_up

    # --- requests ---

    @contextlib.asynccontextmanager
    async def place(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Count a request with a body of ``num_bytes`` until it ends, and wait until fewer than ``max_num_seqs`` are at
        the upstream; API keys come in turn."""
        task = asyncio.current_task()
        assert task is not None
        self._live[owner] += 1
        self._num_request_bytes[owner] += num_bytes
        self._exchanges.add(task)
        try:
            async with self._slots.place(owner):
                self.metrics.stats.num_running += 1
                try:
                    yield
                finally:
                    self.metrics.stats.num_running -= 1
        finally:
            self._live[owner] -= 1
            self._num_request_bytes[owner] -= num_bytes
            if not self._live[owner]:
                del self._live[owner], self._num_request_bytes[owner]
            self._exchanges.discard(task)

    def check_room(self, owner: str, num_bytes: int = 0) -> None:
        """Raise ``Unavailable`` while the server drains or the upstream is down, and ``QueueFull`` for a full queue, or
        for a body of ``num_bytes`` in addition to too many others, unless the API key has not had its share."""
        if self.is_draining:
            raise Unavailable("The server takes no requests now.", retry_after=5)
        if not self._is_up:
            raise UpstreamUnavailable
        if not has_share(self._live, owner, 1, self._room):
            raise QueueFull(
                f"The queue is full: {self._room} requests are unfinished, and this API key has its share of them. "
                "Try again shortly.",
                retry_after=RETRY_AFTER_SECONDS,
            )
        if self._live[owner] and not has_share(self._num_request_bytes, owner, num_bytes, MAX_REQUEST_BYTES):
            total = self._num_request_bytes.total()
            raise QueueFull(
                f"The queue is full: the bodies of unfinished requests have {total:,} bytes. Try again shortly.",
                retry_after=RETRY_AFTER_SECONDS,
            )

    @contextlib.asynccontextmanager
    async def open(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[UpstreamAnswer]:
        """Send a request; the answer has its first piece. Retries when the connection fails before that.

        Raises ``UpstreamUnavailable`` after ``ATTEMPTS`` failures, ``UpstreamFailed`` for an invalid response, and
        ``UpstreamSilent`` if there is none.
        """
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE * 2 ** (attempt - 1))
            is_begun = False
            try:
                async with self._connections.request(method, target, headers, body) as connection:
                    answer = UpstreamAnswer(connection)
                    await answer.receive_first()
                    is_begun = True
                    yield answer
                    return
            except ConnectionFailed as error:
                if is_begun:
                    raise
                if isinstance(error, InvalidResponse | ServerSilent):
                    logger.warning("a request to the upstream failed: %s", error)
                    raise failure_of(error) from None
                logger.warning("a request to the upstream failed before its first byte: %s", error)
                self._check_now.set()
        raise UpstreamUnavailable


def _valid_url(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise ConfigError(f"upstream: {text!r} is not a URL such as http://127.0.0.1:8001")
    # The API's paths begin with /v1, which clients' base URLs contain and this one need not.
    return text.rstrip("/").removesuffix("/v1") + "/"
