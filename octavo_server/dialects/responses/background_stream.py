"""Background responses while they are computed, and the streams of events that clients read of them.

Any number of connections read a response, each from the event after the last one that its client has. With a journal,
events are sent when their tokens are on disk, so that they are the same if the server is killed and continues.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.errors import InvalidParameter
from octavo.text.message_parser import Piece
from octavo_server.dialects.chat_reply import ChatReply
from octavo_server.dialects.responses.events import ResponseEvents, pieces_of
from octavo_server.dialects.responses.stored_responses import Record
from octavo_server.durable.journal import Journal
from octavo_server.durable.reader import StreamChanged
from octavo_server.http.response import HEADERS, KEEP_ALIVE, KEEP_ALIVE_SECONDS

UNFINISHED: dict[str, Any] = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
"""Members of a response object before its end."""


class LiveResponse:
    """A response with the pieces of its output so far, and those who wait for more."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.pieces: list[Piece] = []
        self.is_started = False
        self.is_finished = False
        """Whether ``record`` is final and stored."""
        self.is_interrupted = False
        """Whether the server ends, or the response was deleted: streams end without a final event."""
        self._changed = asyncio.Event()

    @classmethod
    def finished(cls, record: Record) -> LiveResponse:
        """A finished response, to be read again. Raises ``InvalidParameter`` if its events are not known."""
        if record.deltas is None:
            raise InvalidParameter(
                "stream", "This response has log-probabilities, or is of an earlier version, and cannot be streamed."
            )
        live = cls(record)
        live.pieces = list(pieces_of(record.response["output"], record.deltas))
        live.is_finished = True
        return live

    async def follow(self, reply: ChatReply, is_shown: bool) -> list[Piece]:
        """Collect the pieces of ``reply`` to its end, and return them. Raises ``RequestError``.

        Readers get them as they come if ``is_shown``, else at the end.
        """
        pieces: list[Piece] = []
        generation, ended = reply.generation, asyncio.Event()

        def take() -> None:
            if generation.take_noted():
                pieces.extend(reply.pieces())
                self.notify()
            if not generation.num_unfinished:
                ended.set()

        self.is_started, self.is_interrupted = True, False
        if is_shown:
            self.pieces = pieces
        self.notify()
        generation.listen(take)
        if generation.reader is not None:
            generation.reader.begin(None, is_by_token=True)
        take()
        await ended.wait()
        if generation.error is not None:
            raise generation.error
        return pieces

    def notify(self) -> None:
        """Wake the readers."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def finish(self) -> None:
        """Let the streams end: the response is stored."""
        self.is_finished = True
        self.notify()

    def interrupt(self) -> None:
        """End the streams without a final event."""
        self.is_interrupted = True
        self.notify()

    def check(self, after: int) -> None:
        """Raise ``RequestError`` unless a stream can continue after the event of this number."""
        events = ResponseEvents(as_begun(self.record.response), after=math.inf)
        events.start()
        if self.record.is_restarted and after >= events.number:
            message = (
                "The response was computed again since that event was sent, and its text may differ, so the stream "
                "cannot be continued. Read it from the start, without 'starting_after'."
            )
            raise StreamChanged(message, param="starting_after")
        if self.is_finished:
            _render_end(events, self.record, self.pieces)
            if after >= events.number:
                last = events.number - 1
                raise InvalidParameter("starting_after", f"'starting_after' must be at most {last}, the last event.")

    async def read(self, after: int, journal: Journal | None) -> AsyncIterator[bytes]:
        """The events after the one of this number, to the end."""
        events, place, pieces = ResponseEvents(as_begun(self.record.response), after), 0, self.pieces
        yield events.begin()
        while True:
            if place and self.pieces is not pieces:
                return  # it was begun again: whether the text is the same, ``check`` says when the client returns
            changed, pieces, is_finished = self._changed, self.pieces, self.is_finished
            count = len(pieces)
            if journal is not None and place < count and not is_finished:
                await journal.synced()
            data = events.start() if self.is_started else b""
            if is_finished:
                yield data + _render_end(events, self.record, pieces[place:])
                return
            if place < count:
                data += events.frames(pieces[place:count])
                place = count
            if data:
                yield data
            if self.is_interrupted:
                return
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    await changed.wait()
            except TimeoutError:
                yield KEEP_ALIVE


def as_begun(response: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a response object as it was when the response was begun."""
    return {**response, **UNFINISHED, "status": "queued" if response["background"] else "in_progress", "output": []}


def _render_end(events: ResponseEvents, record: Record, pieces: list[Piece]) -> bytes:
    """The rest of the events of a finished response, whose last pieces are ``pieces``."""
    status, data = record.response["status"], events.frames(pieces)
    if status in ("completed", "incomplete"):
        data += events.close(status)
    return data + events.last(record.response)


def event_stream(
    live: LiveResponse, journal: Journal | None, after: int = -1, headers: Mapping[str, str] | None = None
) -> Response:
    """The response's events after the one of this number. Raises ``RequestError``."""
    live.check(after)
    return StreamingResponse(live.read(after, journal), headers={**HEADERS, **(headers or {})})


def position(request: Request) -> int | None:
    """The number of the event after which a stream is requested, -1 for a whole stream; ``None`` if no stream is.

    Raises ``InvalidParameter``.
    """
    query = request.query_params
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidParameter("stream", "'stream' must be true or false.")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise InvalidParameter("starting_after", "'starting_after' must be the sequence number of an event.")
    if stream == "false":
        if after is not None:
            raise InvalidParameter("starting_after", "'starting_after' needs 'stream=true'.")
        return None
    return -1 if after is None else int(after)
