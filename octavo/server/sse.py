"""Answers over time: server-sent events, and waiting for a whole answer while watching for a client that leaves.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, with the OpenAI API's habits: frames of one
``data:`` line, ``data: [DONE]`` at the end, comments as signs of life.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import RequestError
from octavo.server.errors import error_object
from octavo.server.gate import DIRECT_SEND
from octavo.server.generation import Choice, ClientGone, Generation

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventWriter(Protocol):
    """Turns news into frames; each API has its own."""

    def frames(self, choice: Choice) -> bytes:
        """Everything that is new about a choice; its end, when it ended."""
        ...

    def last_frames(self) -> bytes:
        """What follows the end of all choices, but for the stream's own end."""
        ...


@contextlib.asynccontextmanager
async def attended(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Answer a generation inside this: it fails with ``ClientGone`` when the client leaves; at the end it is closed."""
    watcher = asyncio.create_task(_watch(generation, receive))
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


async def _watch(generation: Generation, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(ClientGone())


async def whole(generation: Generation, request: Request) -> list[Choice]:
    """All choices, once they are finished. Raises ``RequestError`` or ``ClientGone``."""
    async with attended(generation, request.receive):
        return await generation.result()


class EventStream(Response):
    """Streams a generation.

    The status goes out with the first event, so that whatever goes wrong before it has a status of its own. An
    error after that is an event. ``END`` closes the stream, also after an error.
    """

    END = DONE

    def __init__(self, generation: Generation, writer: EventWriter, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self.generation = generation
        self.writer = writer
        self._last_sent = 0.0
        self._timer: asyncio.TimerHandle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with attended(self.generation, receive):
            data = b"".join(map(self.writer.frames, await self.generation.news()))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # The server's own `send`, because the layers between only look at the start of a response.
            send = scope.get(DIRECT_SEND, send)
            if not self.generation.is_over:
                # At once, so that it leaves together with the headers.
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = b""
            self._last_sent = asyncio.get_running_loop().time()
            self._watch_silence()
            try:
                # A task of its own, so that every wake-up need not climb through all the layers above.
                await asyncio.create_task(self._send_all(data, send))
            finally:
                self._timer.cancel()

    async def _send_all(self, data: bytes, send: Send) -> None:
        generation, clock, frames = self.generation, asyncio.get_running_loop().time, self.writer.frames
        try:
            while not generation.is_over:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._last_sent = clock()
                choices = await generation.news()
                data = b"".join(map(frames, choices)) if choices else KEEP_ALIVE
            data += self.writer.last_frames()
        except RequestError as error:
            data = self.error_frames(error)
        await self.before_end()
        await send({"type": "http.response.body", "body": data + self.END, "more_body": False})

    async def before_end(self) -> None:
        """Called before the last bytes are sent."""

    def error_frames(self, error: RequestError) -> bytes:
        """The events that tell of an error."""
        return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n"

    def _watch_silence(self) -> None:
        """Nudge the stream when nothing was sent for a while, which makes it send a comment."""
        loop = asyncio.get_running_loop()
        due = self._last_sent + KEEP_ALIVE_SECONDS
        if loop.time() >= due:
            self.generation.nudge()
            due = loop.time() + KEEP_ALIVE_SECONDS
        self._timer = loop.call_at(due, self._watch_silence)
