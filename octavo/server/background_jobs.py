"""Jobs that run independently of any connection: background responses and batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message

from octavo.errors import QueueFull, Unavailable
from octavo.server.keys import CALLER, Caller

RETRY_SECONDS = 1
SETTLE_SECONDS = 1
"""Most seconds that a client waits for a job that only has to store its result."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundJobs:
    """The running jobs, by id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task; exceptions are logged."""
        task = asyncio.create_task(work)
        self._tasks[id] = task
        task.add_done_callback(lambda _: self._end(id, task))

    def _end(self, id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(id) is task:
            del self._tasks[id]
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

    async def settle(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Start ``work`` and wait up to ``SETTLE_SECONDS`` for it; it continues if it takes longer."""
        self.start(id, work)
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
