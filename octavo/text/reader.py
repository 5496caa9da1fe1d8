"""Reads a message that arrives in pieces, and says what it is made of: text, reasoning, calls of functions.

A format is written as if the whole text were there: a generator over a ``Reader``, which stops at a ``yield`` wherever
more text is needed to decide. Every decision depends on the text alone and not on how it was cut, so for any way of
cutting, the pieces join to the same message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple, TypeVar

MAX_DEPTH = 64
"""Of brackets in a call; deeper ones are text."""
MAX_FAILURES = 16
"""What looks like a call and is none, in one message; after so many, nothing is tried any more."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a format: it stops where more text is needed, and returns what it found."""

_JSON_MARKS = re.compile(r'["{}\[\]]')
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}
_BLANKS = re.compile(r"\s*")


Kind = Literal["content", "reasoning"]


class Text(NamedTuple):
    """Some more text of one kind."""

    kind: Kind
    text: str


class Call(NamedTuple):
    """A function to call. ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str
    is_cut: bool = False
    """The message was cut in the arguments, which are only their beginning, or nothing yet."""


Piece = Text | Call
Format = Callable[["Reader"], Steps[None]]


class Reader:
    """The text so far, a place in it, and what was found before that place."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.is_ended = False
        """Whether no more text will come."""
        self.is_cut = False
        """Whether the message was cut: what is not whole at the end may be the beginning of a call."""
        self.num_calls = 0
        self._text = ""
        self._place = 0
        self._num_attempts = 0
        """Attempts under way: the text since their marks may be read again."""
        self._num_failures = 0
        self._blanks = ""
        """Blanks at the end of the content so far: they belong to it unless a call follows."""

    def feed(self, text: str) -> None:
        """Put ``text`` behind what is there."""
        self._text += text

    def _forget(self) -> None:
        """Drop the text before this place, which nothing reads again."""
        if not self._num_attempts:
            self._text, self._place = self._text[self._place :], 0

    # ---- looking

    def available(self, count: int) -> Steps[bool]:
        """Wait until there are ``count`` more characters; say whether there are."""
        while len(self._text) - self._place < count:
            if self.is_ended:
                return False
            yield
        return True

    def literal(self, text: str) -> Steps[bool]:
        """Pass over ``text`` if it is what comes next; say whether it was."""
        for count in range(1, len(text) + 1):
            if not (yield from self.available(count)):
                return False
            if not self._text.startswith(text[:count], self._place):
                return False
        self._place += len(text)
        return True

    def comes(self, text: str) -> Steps[bool]:
        """Say whether ``text`` is what comes next, without passing over it."""
        found = yield from self.literal(text)
        if found:
            self.step_back(text)
        return found

    def step_back(self, text: str) -> None:
        """Go back over ``text``, the last thing that was passed over."""
        self._place -= len(text)

    def blanks(self) -> Steps[None]:
        """Pass over blanks."""
        while True:
            found = _BLANKS.match(self._text, self._place)
            assert found is not None
            self._place = found.end()
            if self._place < len(self._text) or not (yield from self.available(1)):
                return

    def leading(self, text: str) -> Steps[bool]:
        """Pass over ``text`` with the blanks around it, if it is what comes next, or pass over nothing."""
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
        """The text up to the first of ``marks``, and that mark, passed over; ``None`` when none comes."""
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
        """The first place of a mark; of several that begin there, the first one listed."""
        found = [(self._text.find(mark, start), order) for order, mark in enumerate(marks)]
        places = [entry for entry in found if entry[0] >= 0]
        if not places:
            return None
        place, order = min(places)
        return place, marks[order]

    def json(self, opening: str = "{") -> Steps[str | None]:
        """The text of a JSON object (or of a list, with ``[``), passed over; see ``enclosed``."""
        return (yield from self.enclosed(opening, _JSON_MARKS))

    def enclosed(self, opening: str, marks: re.Pattern[str]) -> Steps[str | None]:
        """The text from the bracket ``opening``, which comes next, to the one that closes it, passed over.

        ``None`` when there is none, or too much is nested. Only what ``marks`` finds, brackets and quotes, is looked
        at; whether the text is sound is for a parser to say.
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
        """Pass over blanks; say whether nothing else comes."""
        yield from self.blanks()
        return not (yield from self.available(1))

    def take_cut(self) -> str:
        """Pass over what is left of a message that was cut; empty for any other."""
        if not self.is_cut:
            return ""
        text, self._place = self._text[self._place :], len(self._text)
        return text

    def drop_header(self, marks: tuple[str, ...]) -> Steps[None]:
        """At the end: pass over what is left if it begins with one of ``marks``, and so is no text."""
        for mark in marks:
            if (yield from self.literal(mark)):
                self._place = len(self._text)
                return

    # ---- telling

    def text_until(self, marks: tuple[str, ...], kind: Kind = "content") -> Steps[str | None]:
        """Tell the text up to the first of ``marks`` as it comes. The mark, passed over; ``None`` when none came."""
        longest = max(map(len, marks))
        while True:
            found = self._find(marks, self._place)
            if found is not None:
                place, mark = found
                self.tell(kind, self._text[self._place : place])
                self._place = place + len(mark)
                return mark
            end = len(self._text)
            if not self.is_ended:
                tails = range(max(self._place, end - longest + 1), end)
                end = next((place for place in tails if self._begins_mark(marks, place)), end)
            self.tell(kind, self._text[self._place : end])
            self._place = end
            if self.is_ended:
                return None
            self._forget()
            yield

    def _begins_mark(self, marks: tuple[str, ...], place: int) -> bool:
        tail = self._text[place:]
        return any(mark.startswith(tail) for mark in marks)

    def rest(self, kind: Kind = "content") -> Steps[None]:
        """Tell everything that comes."""
        while True:
            self.tell(kind, self._text[self._place :])
            self._place = len(self._text)
            if self.is_ended:
                return
            self._forget()
            yield

    def attempt(self, read: Callable[[Reader], Steps[list[Call] | None]], mark: str = "") -> Steps[bool]:
        """Read calls that ``mark`` opened; when there are none, the mark was text, and so is what follows it.

        Says whether there were calls.
        """
        if self._num_failures >= MAX_FAILURES:
            self.tell("content", mark)
            return False
        place = self._place
        self._num_attempts += 1
        calls = yield from read(self)
        self._num_attempts -= 1
        if calls is None:
            self._num_failures += 1
            self._place = place
            self.tell("content", mark)
            return False
        for call in calls:
            self._blanks = ""
            self.num_calls += 1
            self.pieces.append(call)
        return True

    def tell(self, kind: Kind, text: str) -> None:
        """Give ``text`` out. Blanks between content and a call are not part of the content."""
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

    def tell_blanks(self) -> None:
        """At the end of the message: blanks that no call followed are content after all."""
        if self._blanks and not self.num_calls:
            self._append("content", self._blanks)
        self._blanks = ""


class MessageParser:
    """Turns pieces of text into pieces of a message. What a format leaves unread is content."""

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
        """What ``text`` makes certain."""
        if text:
            self._reader.feed(text)
            self._go_on()
        return self._taken()

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """What is left at the end; ``is_cut`` when the model had no tokens left for more."""
        self._reader.is_ended, self._reader.is_cut = True, is_cut
        self._go_on()
        self._reader.tell_blanks()
        return self._taken()

    def _go_on(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self

    def _taken(self) -> list[Piece]:
        pieces, self._reader.pieces = self._reader.pieces, []
        return pieces
