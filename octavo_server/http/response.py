"""Responses: JSON, and server-sent events of a generation, with detection of client disconnects.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, with the OpenAI API's conventions: frames of one
``data:`` line, ``data: [DONE]`` at the end, comments as keep-alives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import CANCELLATIONS, RequestError
from octavo_server.generation import ClientGone, EventWriter, GeneratedChoice, Generation, ignore_updates
from octavo_server.http.error_responses import error_object
from octavo_server.http.server import WRITE_PIECE, WritePiece

KEEP_ALIVE_SECONDS = 10.0
"""Interval of the check for silence; a stream is thus silent for at most twice as long."""
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

encode = msgspec.json.encode

_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that JSON does not escape and that some event stream readers treat as line breaks."""


def encode_line(value: object) -> bytes:
    """``value`` as JSON on a single line for all event stream readers."""
    data = encode(value)
    if not data.isascii():
        for line_break, escape in _LINE_BREAKS:
            data = data.replace(line_break, escape)
    return data


def json_response(body: object, headers: Mapping[str, str]) -> Response:
    return Response(encode(body), headers=headers, media_type="application/json")


@contextlib.asynccontextmanager
async def attended(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Context of a response: fails the generation with ``ClientGone`` on disconnect, and closes it at the end."""
    watcher = asyncio.create_task(_watch(generation, receive))
    try:
        yield
    finally:
        watcher.cancel()
        generation.end()


async def _watch(generation: Generation, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(ClientGone())


async def finished_choices(generation: Generation, request: Request) -> list[GeneratedChoice]:
    """Wait until all choices are finished, and return them. Raises ``RequestError`` or ``ClientGone``."""
    async with attended(generation, request.receive):
        return await generation.result()


class EventStream(Response):
    """Streams a generation.

    The status is sent with the first event, so that earlier errors get their own status. Later errors are sent as
    events. ``END`` closes the stream, also after an error; ``KEEP_ALIVE`` is sent in silence.

    Output is written by event loop callbacks (see ``Pump``). The response task wakes only for a slow client and at the
    end: waking it for every token would cost more than rendering the event.
    """

    CONTENT_HEADERS: Mapping[str, str] = HEADERS
    KEEP_ALIVE = KEEP_ALIVE
    END = DONE

    def __init__(self, generation: Generation, writer: EventWriter, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**self.CONTENT_HEADERS, **headers})
        del self.headers["content-length"]
        self.generation = generation
        self.writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, frames = self.generation, self.writer.frames
        async with attended(generation, receive):
            data = b"".join(map(frames, await generation.updates()))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pump = Pump(generation, frames, scope.get(WRITE_PIECE, leave_all), self.KEEP_ALIVE)
            try:
                while generation.num_unfinished:
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = await pump.run()
                data += b"".join(map(frames, generation.take_noted()))
                if generation.error is not None:
                    raise generation.error
                data += await self.last_frames(None)
            except RequestError as error:
                data += await self.last_frames(error)
            await send({"type": "http.response.body", "body": data + self.END, "more_body": False})

    async def last_frames(self, error: RequestError | None) -> bytes:
        """Frames after all output, on success or with ``error``, before the stream's end marker."""
        return self.writer.last_frames() if error is None else self.error_frames(error)

    def error_frames(self, error: RequestError) -> bytes:
        """The events that report an error."""
        return b"data: " + encode(error_object(error)) + b"\n\n"


def leave_all(data: bytes) -> bool:
    """Substitute for servers without ``WRITE_PIECE``: write nothing."""
    return False


class Pump:
    """Writes a generation's new output from event loop callbacks, without waking a task."""

    __slots__ = (
        *("_call_soon", "_frames", "_generation", "_is_called", "_is_silent", "_keep_alive", "_left", "_loop"),
        *("_timer", "_write"),
    )

    def __init__(
        self,
        generation: Generation,
        frames: Callable[[GeneratedChoice], bytes],
        write: WritePiece,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        self._generation = generation
        self._frames = frames
        self._write = write
        self._keep_alive = keep_alive
        """Sent in silence."""
        self._loop = asyncio.get_running_loop()
        self._call_soon = self._loop.call_soon
        self._is_called = False
        """Whether a call of ``_pump`` is scheduled."""
        self._is_silent = False
        """Whether nothing was written since the last ``_watch_silence``."""
        self._timer: asyncio.TimerHandle
        self._left: asyncio.Future[bytes]
        """Resolves to data that could not be written at once, or to b"" at the end."""

    async def run(self) -> bytes:
        """Run until the generation ends (returns b"") or the client is slow (returns the unwritten data)."""
        self._left = self._loop.create_future()
        self._is_silent = False
        self._watch_silence()
        self._generation.listen(self._call)
        self._pump()  # output from before this listener was set
        try:
            return await self._left
        finally:
            self._timer.cancel()
            self._generation.listen(ignore_updates)

    def _call(self) -> None:
        """Schedule ``_pump`` after the current pass over the listeners."""
        if not self._is_called:
            self._is_called = True
            self._call_soon(self._pump)

    def _pump(self) -> None:
        self._is_called = False
        generation = self._generation
        if not generation.num_unfinished:
            self._leave(b"")
        elif not self._left.done():
            try:
                self._send(b"".join(map(self._frames, generation.take_noted())))
            except CANCELLATIONS:
                raise
            except BaseException as error:
                self._left.set_exception(error)

    def _send(self, data: bytes) -> None:
        self._is_silent = False
        if data and not self._write(data):
            self._leave(data)

    def _leave(self, data: bytes) -> None:
        if not self._left.done():
            self._left.set_result(data)

    def _watch_silence(self) -> None:
        """Send a comment if nothing was sent since the last check."""
        if self._is_silent and not self._left.done():
            self._send(self._keep_alive)
        self._is_silent = True
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._watch_silence)
