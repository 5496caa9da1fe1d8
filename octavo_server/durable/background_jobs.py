"""Jobs that run independently of any connection: background responses and batches."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message

from octavo.errors import QueueFull, Unavailable
from octavo_server.tenants.api_keys import CALLER, Caller, has_share

MAX_JOBS = 1024
"""Unfinished jobs of clients, as long as a single API key has all of them."""
RETRY_SECONDS = 1
SETTLE_SECONDS = 1
"""Most seconds that a client waits for a job that only has to store its result."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundJobs:
    """The running jobs, by id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, str] = {}
        """API keys of the clients' jobs."""

    def check_room(self, owner: str) -> None:
        """Raise ``QueueFull`` unless there is room for another job of this API key."""
        if not has_share(Counter(self._owners.values()), owner, 1, MAX_JOBS):
            message = (
                f"{MAX_JOBS} background responses and batches are unfinished, and this API key has its share of them. "
                "Try again when one has ended."
            )
            raise QueueFull(message, retry_after=RETRY_SECONDS)

    def start(self, id: str, work: Coroutine[Any, Any, None], owner: str | None = None) -> None:
        """Run ``work`` as a task, for an API key unless it is the server's own; exceptions are logged."""
        task = asyncio.create_task(work)
        self._tasks[id] = task
        if owner is not None:
            self._owners[id] = owner
        task.add_done_callback(lambda _: self._end(id, task))

    def _end(self, id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(id) is task:
            del self._tasks[id]
            self._owners.pop(id, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s failed", id, exc_info=task.exception())

    async def cancel(self, id: str) -> bool:
        """Cancel a job and wait for its end; return whether it was running."""
        task = self._tasks.get(id)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return True

    async def settle(self, id: str, work: Coroutine[Any, Any, None], owner: str) -> None:
        """Start ``work`` and wait up to ``SETTLE_SECONDS`` for it; it continues if it takes longer."""
        self.start(id, work, owner)
        await asyncio.wait([self._tasks[id]], timeout=SETTLE_SECONDS)

    async def close(self) -> None:
        """Cancel all jobs."""
        for id in list(self._tasks):
            await self.cancel(id)


async def retry_while_unavailable(attempt: Callable[[], Awaitable[T]]) -> T:
    """Call ``attempt`` until it no longer raises ``QueueFull`` or ``Unavailable`` (full queue or disk, no engine)."""
    while True:
        try:
            return await attempt()
        except (QueueFull, Unavailable) as refusal:
            await asyncio.sleep(refusal.retry_after or RETRY_SECONDS)


def inner_request(
    app: Starlette, path: str, body: bytes, caller: Caller, more_headers: Iterable[tuple[bytes, bytes]] = ()
) -> Request:
    """A request made by the server itself, for the handlers that serve clients."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # no client, so never a disconnect
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more_headers]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "app": app,
        CALLER: caller,
    }
    return Request(scope, receive)
