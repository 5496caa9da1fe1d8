"""One connection's view of a durable request: its output from any position on, with event ids.

An event's ``id`` is the position of a client that has that event, and a stream resumes from it alone: for each choice
the number of tokens, plus one at its end, and the CRC-32 of those tokens, as in ``37.1a2b3c4d``; choices are separated
by ``-``. Where one piece of output is several events, those before the last add ``+CHOICE.TO.COUNT``: the first COUNT
events of that choice's output up to position TO. ``+u`` means that the usage was received, too.
"""

from __future__ import annotations

import re
import zlib
from array import array
from typing import NamedTuple, Protocol

import msgspec
from starlette.requests import Request

from octavo.errors import InvalidParameter, RequestError
from octavo.types import FinishReason, Output
from octavo_server.durable.records import Begin
from octavo_server.generation import EventWriter, GeneratedChoice, Generation

HEADER = "last-event-id"
_POINT = r"(\d{1,9})\.([0-9a-f]{8})"
_ID = re.compile(rf"({_POINT}(?:-{_POINT})*)(?:\+(?:(u)|(\d{{1,5}})\.(\d{{1,9}})\.(\d{{1,5}})))?")


class StreamChanged(RequestError):
    """What is before the client's position may not be what it received; the stream cannot be continued."""

    status = 409
    code = "stream_changed"


class Point(NamedTuple):
    """How far a client is in one choice."""

    at: int
    """Tokens, plus one at the end."""
    checksum: int


class Position(NamedTuple):
    """How far a client is in a stream."""

    points: list[Point]
    has_usage: bool = False
    piece: tuple[int, int, int] | None = None
    """Choice, position and number of events of a piece that was received in part."""


def parse_position(text: str, num_choices: int) -> Position:
    """The position of a ``Last-Event-ID``. Raises ``InvalidParameter``."""
    found = _ID.fullmatch(text)
    points = [Point(int(a), int(b, 16)) for a, b in re.findall(_POINT, found[1])] if found else []
    if found is None or len(points) != num_choices:
        raise InvalidParameter("Last-Event-ID", "'Last-Event-ID' must be the id of an event of this stream.")
    usage, index, to, count = found.groups()[-4:]
    piece = None if index is None else (int(index), int(to), int(count))
    if piece is not None and piece[0] >= num_choices:
        raise InvalidParameter("Last-Event-ID", "'Last-Event-ID' must be the id of an event of this stream.")
    return Position(points, usage is not None, piece)


class DurableSource(Protocol):
    """A durable request, as its readers see it."""

    def add_reader(self, reader: DurableReader) -> None: ...
    def remove_reader(self, reader: DurableReader) -> None: ...
    def stop(self, request_id: int) -> None: ...


class _View:
    """What a reader knows of one choice. All of it is looked at for each token, so it is in one place."""

    __slots__ = ("at", "checksum", "choice", "left", "sent_at", "sent_checksum", "stops")

    def __init__(self, choice: GeneratedChoice) -> None:
        self.choice = choice
        self.at = self.checksum = 0
        """How far the choice is; see ``Point``."""
        self.sent_at = self.sent_checksum = 0
        """How far the client is."""
        self.stops: list[int] = []
        """Positions up to which the output is rendered at once: where the client is, and the end of a partial piece."""
        self.left = b""
        """Events to send before others."""

    def note_sent(self) -> None:
        """The client has all events so far, or will."""
        self.sent_at, self.sent_checksum = self.at, self.checksum


class DurableReader:
    """Receives a durable request's outputs for one generation, and numbers the events of its stream."""

    __slots__ = ("_is_by_token", "_position", "_source", "_views", "_writer", "created", "generation", "unique")

    def __init__(self, source: DurableSource, begin: Begin, generation: Generation) -> None:
        self.generation = generation
        self.unique, self.created = begin.unique, begin.created
        self._source = source
        self._views = [_View(choice) for choice in generation.choices]
        self._position: Position | None = None
        self._writer: EventWriter | None = None
        self._is_by_token = False

    def begin_stream(self, writer: EventWriter, request: Request) -> EventWriter:
        """``begin`` for a stream, from the client's position on; returns ``writer`` with ids for its events.

        Raises ``InvalidParameter`` for an invalid position.
        """
        last = request.headers.get(HEADER)
        position = None if last is None else parse_position(last, len(self._views))
        self.begin(writer, position)
        return self

    def begin(self, writer: EventWriter | None, position: Position | None = None, *, is_by_token: bool = False) -> None:
        """Take all output so far, and receive what follows; a stream's events come from ``writer``.

        With ``is_by_token``, no more than one token is given to a choice at once.
        """
        self._writer, self._position, self._is_by_token = writer, position, is_by_token
        if position is not None:
            for view, point in zip(self._views, position.points, strict=True):
                view.stops = [point.at] if point.at else []
            if position.piece is not None:
                self._views[position.piece[0]].stops.append(position.piece[1])
        self._source.add_reader(self)

    # --- the generation's engine ---

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """The text of a choice ended with a stop string, or the connection ended, which ends no computation."""
        if reason == "stop":
            self._source.stop(request_id)
        else:
            self._source.remove_reader(self)

    # --- output ---

    def on_output(self, index: int, output: Output) -> None:
        view = self._views[index]
        if self._is_by_token:
            last = max(len(output.tokens) - 1, 0)
            for place in range(last):
                self._take(view, _part(output, place, place + 1))
            self._take(view, _part(output, last, None))
            return
        room = view.stops[0] - view.choice.num_tokens if view.stops else 0
        if 0 < room < len(output.tokens):
            self._take(view, _part(output, 0, room))
            self.on_output(index, _part(output, room, None))
        else:
            self._take(view, output)

    def on_error(self, error: RequestError) -> None:
        self.generation.fail(error)

    def _take(self, view: _View, output: Output) -> None:
        choice = view.choice
        if choice.finish_reason is not None:
            return
        before = choice.num_tokens
        choice.on_output(output)
        counted = output.tokens[: choice.num_tokens - before]
        view.checksum = zlib.crc32(array("I", counted), view.checksum)
        view.at = choice.num_tokens + (choice.finish_reason is not None)
        if view.stops:
            if view.at >= view.stops[0]:
                self._pass_stop(view)
            elif choice.finish_reason is not None:
                self._fail()

    def _pass_stop(self, view: _View) -> None:
        """Leave out what the client has, up to here."""
        choice, position = view.choice, self._position
        assert position is not None
        point, given = Point(view.at, view.checksum), position.points[choice.index]
        stop = view.stops.pop(0)
        if point.at != stop or (stop == given.at and point != given):
            self._fail()
            return
        if self._writer is not None:
            data = self._writer.frames(choice)
            if stop != given.at:
                assert position.piece is not None
                view.left = self._numbered(view, data, position.piece[2])
        view.note_sent()
        choice.is_noted = False
        self.generation.note(choice)

    def _fail(self) -> None:
        generation, error = self.generation, _changed()
        generation.take_noted()
        generation.fail(error)
        generation.error = generation.error or error  # also when all choices are finished

    # --- events ---

    def frames(self, choice: GeneratedChoice) -> bytes:
        """The events of a choice's new output, with ids; empty while the client has all of it."""
        view = self._views[choice.index]
        assert self._writer is not None
        if view.stops:
            choice.is_noted = False
            return b""
        left, view.left = view.left, b""
        if view.at == view.sent_at:
            choice.is_noted = False
            return left
        data = self._writer.frames(choice)
        return left + self._numbered(view, data) if data else left

    def _numbered(self, view: _View, data: bytes, num_known: int = 0) -> bytes:
        """``data``, the events up to where the choice is, with ids; less the first ``num_known`` of them."""
        if not num_known and data.find(b"\n\n") == len(data) - 2:
            view.note_sent()
            return b"id: %b\n%b" % (self._label(), data)
        before, events = self._label(), data.split(b"\n\n")[:-1]
        view.note_sent()
        labels = [b"%b+%d.%d.%d" % (before, view.choice.index, view.at, number) for number in range(1, len(events))]
        pairs = list(zip([*labels, self._label()], events, strict=True))[num_known:]
        return b"".join([b"id: %b\n%b\n\n" % pair for pair in pairs])

    def last_frames(self) -> bytes:
        assert self._writer is not None
        data = self._writer.last_frames()
        if not data or (self._position is not None and self._position.has_usage):
            return b""
        return b"id: %b+u\n%b" % (self._label(), data)

    def _label(self) -> bytes:
        """The position of a client that has all events so far."""
        return b"-".join([b"%d.%08x" % (view.sent_at, view.sent_checksum) for view in self._views])


def _part(output: Output, start: int, end: int | None) -> Output:
    """Some of an output's tokens; the end of the text is in the last part."""
    part = msgspec.structs.replace(output, tokens=output.tokens[start:end])
    if output.logprobs:
        part.logprobs = output.logprobs[start:end]
    if start:
        part.prompt_logprobs = None
        part.num_drafts = part.num_accepted_drafts = 0
    if end is not None:
        part.finish_reason = part.stop_token_id = part.error = None
    return part


def _changed() -> StreamChanged:
    return StreamChanged(
        "The text before 'Last-Event-ID' is not the one that was sent with that id, so the stream cannot be continued. "
        "Send the request again with another 'Idempotency-Key'.",
        param="Last-Event-ID",
    )
