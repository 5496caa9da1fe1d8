"""Incremental parser of a model's message into content, reasoning and tool calls.

A format is written as if the complete text were available: a generator over a ``Reader``, which yields wherever it
needs more text to decide. Every decision depends on the text alone and not on how it was chunked, so any chunking
gives the same message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple, TypeVar

MAX_DEPTH = 64
"""Nesting limit of brackets in a call; anything deeper is text."""
MAX_FAILURES = 16
"""Failed attempts to parse a call in one message; after these, everything is content."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a format: yields where more text is needed, and returns its result."""

_JSON_MARKS = re.compile(r'["{}\[\]]')
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}
_BLANKS = re.compile(r"\s*")


Kind = Literal["content", "reasoning"]


class Text(NamedTuple):
    """Further text of one kind."""

    kind: Kind
    text: str


class Call(NamedTuple):
    """A tool call. ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str
    is_cut: bool = False
    """Whether the message was truncated within the arguments, which are then a prefix, possibly empty."""


Piece = Text | Call
Format = Callable[["Reader"], Steps[None]]


class Reader:
    """The text so far, the read position in it, and the pieces parsed before that position."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.is_ended = False
        """Whether no more text will come."""
        self.is_cut = False
        """Whether the message was truncated: its end may be an incomplete call."""
        self.num_calls = 0
        self._text = ""
        self._place = 0
        self._num_attempts = 0
        """Attempts in progress: the text since their marks may be read again."""
        self._num_failures = 0
        self._blanks = ""
        """Blanks at the end of the content so far: they belong to it unless a call follows."""

    def feed(self, text: str) -> None:
        """Append ``text``."""
        self._text += text

    def _forget(self) -> None:
        """Drop the text before the read position, unless an attempt may read it again."""
        if not self._num_attempts:
            self._text, self._place = self._text[self._place :], 0

    # ---- matching

    def available(self, count: int) -> Steps[bool]:
        """Wait for ``count`` more characters; returns whether they came before the end."""
        while len(self._text) - self._place < count:
            if self.is_ended:
                return False
            yield
        return True

    def literal(self, text: str) -> Steps[bool]:
        """Consume ``text`` if it comes next; returns whether it did."""
        for count in range(1, len(text) + 1):
            if not (yield from self.available(count)):
                return False
            if not self._text.startswith(text[:count], self._place):
                return False
        self._place += len(text)
        return True

    def comes(self, text: str) -> Steps[bool]:
        """Whether ``text`` comes next, without consuming it."""
        found = yield from self.literal(text)
        if found:
            self.step_back(text)
        return found

    def step_back(self, text: str) -> None:
        """Go back over ``text``, which was consumed last."""
        self._place -= len(text)

    def blanks(self) -> Steps[None]:
        """Consume whitespace."""
        while True:
            found = _BLANKS.match(self._text, self._place)
            assert found is not None
            self._place = found.end()
            if self._place < len(self._text) or not (yield from self.available(1)):
                return

    def leading(self, text: str) -> Steps[bool]:
        """Consume ``text`` and the whitespace around it if it comes next, else nothing; returns whether it did."""
        place = self._place
        self._num_attempts += 1
        yield from self.blanks()
        found = yield from self.literal(text)
        if found:
            yield from self.blanks()
        else:
            self._place = place
        self._num_attempts -= 1
        return found

    def until(self, marks: tuple[str, ...]) -> Steps[tuple[str, str] | None]:
        """Consume up to and including the first of ``marks``; returns text and mark, or ``None`` if none comes."""
        searched = self._place
        while True:
            found = self._find(marks, searched)
            if found is not None:
                place, mark = found
                text = self._text[self._place : place]
                self._place = place + len(mark)
                return text, mark
            if self.is_ended:
                return None
            searched = max(self._place, len(self._text) - max(map(len, marks)) + 1)
            yield

    def _find(self, marks: tuple[str, ...], start: int) -> tuple[int, str] | None:
        """Position of the first mark, and the mark; of several at one position, the first one listed."""
        found = [(self._text.find(mark, start), order) for order, mark in enumerate(marks)]
        places = [entry for entry in found if entry[0] >= 0]
        if not places:
            return None
        place, order = min(places)
        return place, marks[order]

    def json(self, opening: str = "{") -> Steps[str | None]:
        """Consume a JSON object (or a list, with ``[``) and return its text; see ``enclosed``."""
        return (yield from self.enclosed(opening, _JSON_MARKS))

    def enclosed(self, opening: str, marks: re.Pattern[str]) -> Steps[str | None]:
        """Consume from the bracket ``opening``, which must come next, to its closing bracket; returns the text.

        ``None`` if ``opening`` does not come next, is never closed, or nests deeper than ``MAX_DEPTH``. Only brackets
        and quotes, found by ``marks``, are examined; a parser has to validate the text.
        """
        if not (yield from self.comes(opening)):
            return None
        start = place = self._place
        depth, quote = 0, ""
        while True:
            found = (_IN_STRING[quote] if quote else marks).search(self._text, place)
            if found is None or (found[0] == "\\" and found.end() == len(self._text)):
                place = len(self._text) if found is None else found.start()
                if self.is_ended:
                    return None
                yield
                continue
            place = found.end() + (found[0] == "\\")
            if found[0] in _IN_STRING:
                quote = "" if quote else found[0]
            elif not quote:
                depth += 1 if found[0] in "{[(" else -1
            if depth > MAX_DEPTH:
                return None
            if depth == 0:
                self._place = place
                return self._text[start:place]

    def at_end(self) -> Steps[bool]:
        """Consume whitespace; returns whether the message ends there."""
        yield from self.blanks()
        return not (yield from self.available(1))

    def take_cut(self) -> str:
        """Consume and return the rest of a truncated message; empty for a complete one."""
        if not self.is_cut:
            return ""
        text, self._place = self._text[self._place :], len(self._text)
        return text

    def drop_header(self, marks: tuple[str, ...]) -> Steps[None]:
        """At the end of the message: drop the rest if it begins with one of ``marks``, which makes it a header."""
        for mark in marks:
            if (yield from self.literal(mark)):
                self._place = len(self._text)
                return

    # ---- emitting

    def text_until(self, marks: tuple[str, ...], kind: Kind = "content") -> Steps[str | None]:
        """Emit text as it comes, up to the first of ``marks``; consumes and returns the mark, ``None`` if none came."""
        longest = max(map(len, marks))
        while True:
            found = self._find(marks, self._place)
            if found is not None:
                place, mark = found
                self.emit(kind, self._text[self._place : place])
                self._place = place + len(mark)
                return mark
            end = len(self._text)
            if not self.is_ended:
                tails = range(max(self._place, end - longest + 1), end)
                end = next((place for place in tails if self._begins_mark(marks, place)), end)
            self.emit(kind, self._text[self._place : end])
            self._place = end
            if self.is_ended:
                return None
            self._forget()
            yield

    def _begins_mark(self, marks: tuple[str, ...], place: int) -> bool:
        tail = self._text[place:]
        return any(mark.startswith(tail) for mark in marks)

    def rest(self, kind: Kind = "content") -> Steps[None]:
        """Emit all further text."""
        while True:
            self.emit(kind, self._text[self._place :])
            self._place = len(self._text)
            if self.is_ended:
                return
            self._forget()
            yield

    def attempt(self, read: Callable[[Reader], Steps[list[Call] | None]], mark: str = "") -> Steps[bool]:
        """Read the calls that ``mark`` opened; if that fails, emit the mark as content and resume behind it.

        Returns whether there were calls.
        """
        if self._num_failures >= MAX_FAILURES:
            self.emit("content", mark)
            return False
        place = self._place
        self._num_attempts += 1
        calls = yield from read(self)
        self._num_attempts -= 1
        if calls is None:
            self._num_failures += 1
            self._place = place
            self.emit("content", mark)
            return False
        for call in calls:
            self._blanks = ""
            self.num_calls += 1
            self.pieces.append(call)
        return True

    def emit(self, kind: Kind, text: str) -> None:
        """Emit ``text``, holding back trailing whitespace of content: it is dropped if a call follows."""
        if kind == "reasoning":
            self._append(kind, text)
        elif solid := text.rstrip():
            self._append(kind, self._blanks + solid)
            self._blanks = text[len(solid) :]
        else:
            self._blanks += text

    def _append(self, kind: Kind, text: str) -> None:
        last = self.pieces[-1] if self.pieces else None
        if not text:
            return
        if isinstance(last, Text) and last.kind == kind:
            self.pieces[-1] = Text(kind, last.text + text)
        else:
            self.pieces.append(Text(kind, text))

    def emit_blanks(self) -> None:
        """At the end of the message: emit the whitespace held back, since no call followed."""
        if self._blanks and not self.num_calls:
            self._append("content", self._blanks)
        self._blanks = ""


class MessageParser:
    """Turns chunks of text into pieces of a message. Text that a format leaves unread is content."""

    def __init__(self, format: Format) -> None:
        self._reader = Reader()
        self._steps = self._all_of(format)
        self._is_done = False

    def _all_of(self, format: Format) -> Steps[None]:
        yield from format(self._reader)
        yield from self._reader.rest()

    @property
    def num_calls(self) -> int:
        """Calls found so far."""
        return self._reader.num_calls

    def push(self, text: str) -> list[Piece]:
        """Append ``text``; returns the pieces that are now certain."""
        if text:
            self._reader.feed(text)
            self._go_on()
        return self._taken()

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """The remaining pieces at the end; ``is_cut`` when the token limit truncated the message."""
        self._reader.is_ended, self._reader.is_cut = True, is_cut
        self._go_on()
        self._reader.emit_blanks()
        return self._taken()

    def _go_on(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self

    def _taken(self) -> list[Piece]:
        pieces, self._reader.pieces = self._reader.pieces, []
        return pieces
