"""The upstream: one server, or several that a router chooses from, and the requests that they have from this server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from octavo.config import ServeConfig
from octavo.errors import ConfigError, QueueFull, RequestError, Unavailable, Withdrawn
from octavo.telemetry.counts import Condition
from octavo.telemetry.metrics import Metrics
from octavo_fleet.proxy.connections import (
    Connection,
    ConnectionFailed,
    Headers,
    InvalidResponse,
    NotConnected,
    ServerSilent,
)
from octavo_fleet.proxy.prefill import PATHS, Prefill, PrefillPrompt, is_keyed
from octavo_fleet.proxy.upstream_process import UpstreamProcess
from octavo_fleet.proxy.upstream_server import CHECK_SECONDS, CHECK_SECONDS_DOWN, UpstreamServer
from octavo_fleet.routing.routers import PrefixAware
from octavo_server.http.error_responses import RETRY_AFTER_SECONDS
from octavo_server.tenants.api_keys import has_share
from octavo_server.tenants.turn_queue import Places

MAX_NUM_SEQS = 1024
"""Requests that the upstream has at once, if ``max_num_seqs`` is not set."""
ATTEMPTS = 3
RETRY_PAUSE = 0.1
"""Seconds before the first retry; each further pause is twice as long."""
DRAIN_POLL_SECONDS = 0.02
BUSY = 503
"""Status of a server that drains, or whose engine starts again."""
MAX_REQUEST_BYTES = 256 << 20
"""Of the bodies of all requests that have not ended. One of each API key is always accepted."""
MAX_HELD_BYTES = 256 << 10
"""A body that is no stream is relayed as a whole up to this size, so that it can be requested again; else in pieces."""

CREATING = frozenset({"v1/files", "v1/batches", "v1/messages/batches", "v1/conversations", "v1/responses"})
"""Paths of POST requests that the upstream stores something new for each time."""

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

    @property
    def is_refusal(self) -> bool:
        """Whether the upstream takes no requests now, unlike where an operator ended one that was computed."""
        return self.status == BUSY and Withdrawn.code.encode() not in self.first


class Upstream:
    """Takes the place of an engine in the serving process: it starts, drains, and knows the live requests."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ``ConfigError`` for an invalid URL or command."""
        settings = config.server
        self._router = PrefixAware()
        self._servers = [UpstreamServer(url) for url in (settings.upstream or "").split(",")]
        prefill = (settings.prefill_upstream or "").split(",") if settings.prefill_upstream else []
        self._prefill = Prefill(prefill, self._router)
        self.url = self._servers[0].url
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
            if len(self._servers) > 1:
                raise ConfigError("upstream_command: is for one upstream")
            self._process = UpstreamProcess(settings.upstream_command, settings.engine_timeout)
        self._check_now = {server: asyncio.Event() for server in (*self._servers, *self._prefill.servers)}
        self._watching: list[asyncio.Task[None]] = []
        self.is_draining = False
        self.is_stopped = False
        """Whether the drain is over, so that requests that are cancelled end with an error."""

    # --- life ---

    async def start(self) -> None:
        """Start the managed upstream, if any, and wait until it is up; another upstream may come up later.

        Raises ``OctavoError`` if the managed one ends first.
        """
        await asyncio.gather(*(server.check() for server in self._check_now))
        if self._process is not None:
            if self._is_up:
                raise ConfigError(f"upstream_command: another server answers at {self.url} already")
            await self._process.start(self._wait_up)
        elif not self._is_up:
            logger.warning("the upstream at %s is down; requests get 503 until it is up", self.url)
        self._watching = [asyncio.create_task(server.watch(now)) for server, now in self._check_now.items()]
        if self._process is not None:
            self._watching.append(asyncio.create_task(self._watch_process(self._process)))

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
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()
        for server in self._check_now:
            server.close()

    # --- state ---

    @property
    def num_live(self) -> int:
        """Accepted requests that have not ended."""
        return self._live.total()

    @property
    def _is_up(self) -> bool:
        return any(server.is_up for server in self._servers)

    @property
    def is_ready(self) -> bool:
        return self._is_up and not self.is_draining

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the upstream last answered."""
        return time.monotonic() - max(server.last_answer for server in self._servers)

    async def _watch_process(self, process: UpstreamProcess) -> None:
        (server,) = self._servers
        last_answer, silent_seconds = 0.0, 0.0
        while True:
            interval = CHECK_SECONDS if server.is_up else CHECK_SECONDS_DOWN
            await asyncio.sleep(interval)
            # Looks are counted: what came while this process stood still is read after the first one.
            silent_seconds = silent_seconds + interval if server.last_answer == last_answer else 0.0
            last_answer = server.last_answer
            if await process.watch(silent_seconds):
                server.last_answer = time.monotonic()

    async def _wait_up(self) -> None:
        while not self._is_up:
            await asyncio.sleep(CHECK_SECONDS_DOWN)
            await self._servers[0].check()

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
    async def open(
        self, method: str, target: str, headers: Headers, body: bytes, owner: str = ""
    ) -> AsyncIterator[UpstreamAnswer]:
        """Send a request; the answer has its first piece. Retries when the connection fails before that, at another
        server if there is one, unless what it creates might be there already. A long prompt is computed by a prefill
        server first, if there are some.

        Raises ``UpstreamUnavailable`` after ``ATTEMPTS`` failures, ``UpstreamFailed`` for an invalid response and for
        what is not retried, and ``UpstreamSilent`` if there is no response.
        """
        prompt = PrefillPrompt(target, body, owner) if len(self._check_now) > 1 else None
        stores_nothing = target.partition("?")[0] in PATHS and not is_keyed(headers)
        tried: list[UpstreamServer] = []
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE * 2 ** (attempt - 1))
            is_begun, server = False, self._chosen(prompt if stores_nothing else None, tried)
            tried.append(server)
            server.num_live += 1
            try:
                sent = body
                if prompt is not None:
                    sent = await self._prefill.body_for(server, prompt, target, headers, body)
                    server.note_sent(prompt.query)
                async with server.connections.request(method, target, headers, sent) as connection:
                    answer = UpstreamAnswer(connection)
                    await answer.receive_first()
                    if answer.is_refusal and stores_nothing and self._others(tried):
                        raise ConnectionFailed("it takes no requests now")
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
                server.is_up = server.is_up and len(self._servers) == 1
                self._check_now[server].set()
                if not isinstance(error, NotConnected) and method == "POST" and _creates(target):
                    raise failure_of(error) from None
            finally:
                server.num_live -= 1
        raise UpstreamUnavailable

    async def ask_each(self, method: str, target: str, headers: Headers) -> list[tuple[int, bytes]]:
        """Status and body of what each server that is up answers, prefill servers, too; without those that fail. Raises
        ``UpstreamFailed`` or ``UpstreamSilent`` if all do."""

        async def ask(server: UpstreamServer) -> tuple[int, bytes] | ConnectionFailed:
            try:
                async with server.connections.request(method, target, headers, b"") as connection:
                    return connection.status, await connection.read_all()
            except ConnectionFailed as error:
                logger.warning("a request to %s failed: %s", server.url, error)
                self._check_now[server].set()
                return error

        found = await asyncio.gather(*map(ask, [each for each in self._check_now if each.is_up] or self._servers))
        answers = [each for each in found if not isinstance(each, ConnectionFailed)]
        if not answers:
            raise next(failure_of(each) for each in found if isinstance(each, ConnectionFailed))
        return answers

    def _others(self, tried: list[UpstreamServer]) -> list[UpstreamServer]:
        return [server for server in self._servers if server.is_up and server not in tried]

    def _chosen(self, prompt: PrefillPrompt | None, tried: list[UpstreamServer]) -> UpstreamServer:
        """The server for a request with this prompt, one that was not tried if there is one; else the first one, which
        has all that is stored."""
        if prompt is None:
            return self._servers[0]
        return self._router.choose(prompt.query, self._others(tried) or self._others([]) or self._servers)


def _creates(target: str) -> bool:
    path = target.partition("?")[0]
    return path in CREATING or (path.startswith("v1/conversations/") and path.endswith("/items"))
