"""Work that no connection waits for: background responses and batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message

from octavo.errors import QueueFull, Unavailable
from octavo.server.caller import CALLER, Caller

RETRY_SECONDS = 1
SETTLE_SECONDS = 1
"""How long a client waits for a job that only has to be written down."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundJobs:
    """The running ones, by id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` on the event loop; what it raises is logged."""
        task = asyncio.create_task(work)
        self._tasks[id] = task
        task.add_done_callback(lambda _: self._end(id, task))

    def _end(self, id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(id) is task:
            del self._tasks[id]
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s failed", id, exc_info=task.exception())

    async def cancel(self, id: str) -> bool:
        """End a job, and wait until it has ended; whether there was one."""
        task = self._tasks.get(id)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return True

    async def settle(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, and wait for a moment: it goes on when it takes longer."""
        self.start(id, work)
        await asyncio.wait([self._tasks[id]], timeout=SETTLE_SECONDS)

    async def close(self) -> None:
        """End all of them."""
        for id in list(self._tasks):
            await self.cancel(id)


async def retry_while_unavailable(attempt: Callable[[], Awaitable[T]]) -> T:
    """``attempt``, again and again while the server has no room for it, in its queue or on its disk, or no engine."""
    while True:
        try:
            return await attempt()
        except (QueueFull, Unavailable) as refusal:
            await asyncio.sleep(refusal.retry_after or RETRY_SECONDS)


def inner_request(app: Starlette, path: str, body: bytes, caller: Caller) -> Request:
    """A request that comes from the server itself, for the same functions that answer those of clients."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # nobody is there to leave
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
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
