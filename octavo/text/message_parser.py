"""Incremental parser of a model's message into content, reasoning and tool calls.

A format is written as if the complete text were available: a generator over a ``TextReader``, which yields wherever it
needs more text to decide. Every decision depends on the text alone and not on how it was chunked, so any chunking
gives the same message. The work is linear in the text: what was searched is not searched again, and text that is
read is dropped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from octavo.text.message_pieces import Call as Call
from octavo.text.message_pieces import CallProgress as CallProgress
from octavo.text.message_pieces import Kind, joined
from octavo.text.message_pieces import Piece as Piece
from octavo.text.message_pieces import Text as Text

MAX_DEPTH = 64
"""Nesting limit of brackets in a call that is parsed at its end; anything deeper is text."""
MAX_FAILURES = 16
"""Failed attempts to parse a call in one message; after these, everything is content."""
MAX_HEAD = 1024
"""Most characters before a mark that has to come, such as that behind a function's name."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a format: yields where more text is needed, and returns its result."""

_JSON_MARKS = re.compile(r'["{}\[\]]')
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}
_IN_JSON_STRING = re.compile(r'["\\\x00-\x1f]')
_BLANKS = re.compile(r"\s*")
_VALUE_STARTS = '"{[-0123456789tfn'
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


@dataclass(frozen=True)
class Format:
    """How a message is parsed."""

    steps: Callable[[TextReader], Steps[None]]
    opens: tuple[str, ...] = ()
    """Marks that open calls."""

    def __call__(self, reader: TextReader) -> Steps[None]:
        return self.steps(reader)


class TextReader:
    """The text so far, the read position in it, and the pieces parsed before that position."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.places: list[tuple[int, int]] = []
        """Where the texts of ``pieces`` begin and end in the complete text; a piece may be several parts of it."""
        self.is_ended = False
        """Whether no more text will come."""
        self.is_cut = False
        """Whether the message was truncated: its end may be an incomplete call."""
        self.num_calls = 0
        self.strays: tuple[str, ...] = ()
        """Marks without meaning in the content. The first one opens reasoning: it is text there, and so is the mark
        that closes what it opened. Any other is left out."""
        self._is_stray_open = False
        self._text = ""
        self._place = 0
        self._num_forgotten = 0
        """Characters of the complete text before ``_text``."""
        self._num_pins = 0
        """Positions in use to which the reader may go back, so that the text after them is kept."""
        self._num_failures = 0
        self._has_run_out = False
        """Whether the message has ended where more text was needed."""
        self._is_empty = False
        """Whether an empty list of calls was read."""
        self._blanks: list[tuple[int, str]] = []
        """Blanks at the end of the content so far, each with its place: they belong to it unless a call follows."""
        self._last = ""
        """The last character of the content so far."""
        self._name: str | None = None
        """Function of the call that is being read."""
        self._arguments: list[str] = []
        self._held: list[Call] | None = None
        """Calls that may turn out to be text; see ``calls_at_end``."""
        self._holds_text = False
        """Whether there was content next to them."""

    def feed(self, text: str) -> None:
        """Append ``text``."""
        own, self._text = self._text, ""  # with one reference to it, CPython appends in place
        own += text
        self._text = own

    def _forget(self) -> None:
        """Drop the text before the read position, unless the reader may go back to it."""
        if not self._num_pins:
            self._num_forgotten += self._place
            self._text, self._place = self._text[self._place :], 0

    # ---- matching

    def available(self, count: int) -> Steps[bool]:
        """Wait for ``count`` more characters; returns whether they came before the end."""
        while len(self._text) - self._place < count:
            if self.is_ended:
                self._has_run_out = True
                return False
            yield
        return True

    def next(self) -> Steps[str]:
        """The next character, which is not consumed; empty at the end."""
        return self._text[self._place] if (yield from self.available(1)) else ""

    def literal(self, text: str) -> Steps[bool]:
        """Consume ``text`` if it comes next; returns whether it did."""
        for count in range(1, len(text) + 1):
            if not (yield from self.available(count)):
                return False
            if self._text[self._place + count - 1] != text[count - 1]:
                return False
        self._place += len(text)
        return True

    def one_of(self, texts: tuple[str, ...]) -> Steps[str | None]:
        """Consume and return the first of ``texts`` that comes next."""
        for text in texts:
            if (yield from self.literal(text)):
                return text
        return None

    def comes(self, *texts: str) -> Steps[bool]:
        """Whether one of ``texts`` comes next, without consuming it."""
        found = yield from self.one_of(texts)
        self._place -= len(found or "")
        return found is not None

    def ends_within(self, text: str) -> bool:
        """Whether no text remains but a beginning of ``text``, and none will come."""
        return self.is_ended and text.startswith(self._text[self._place :])

    def remains(self, pattern: re.Pattern[str]) -> bool:
        """Whether the message has ended, and ``pattern`` matches all that remains of it."""
        return self.is_ended and pattern.fullmatch(self._text, self._place) is not None

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
        place = self._pin()
        yield from self.blanks()
        found = yield from self.literal(text)
        if found:
            yield from self.blanks()
        else:
            self._place = place
        self._unpin()
        return found

    def _pin(self) -> int:
        """Keep the text from the read position on until ``_unpin``, and return that position."""
        self._num_pins += 1
        return self._place

    def _unpin(self) -> None:
        """End the last ``_pin``, unless the beginning of a call has ended it."""
        self._num_pins = max(self._num_pins - 1, 0 if self._held is None else 1)

    def until(self, *marks: str) -> Steps[tuple[str, str] | None]:
        """Consume up to and including the first of ``marks``; returns text and mark.

        ``None``, and nothing is consumed, if none comes within ``MAX_HEAD`` characters.
        """
        searched = self._place
        while True:
            found = _pattern(marks).search(self._text, searched)
            if found is not None and found.start() - self._place <= MAX_HEAD:
                text = self._text[self._place : found.start()]
                self._place = found.end()
                return text, found[0]
            if found is not None or self.is_ended or len(self._text) - self._place > MAX_HEAD + _longest(marks):
                self._has_run_out = self._has_run_out or self.is_ended
                return None
            searched = max(self._place, len(self._text) - _longest(marks) + 1)
            yield

    def string(self) -> Steps[str | None]:
        """Consume a JSON string and return its text, quotes included; ``None`` if none comes."""
        if not (yield from self.comes('"')):
            return None
        place = self._place + 1
        while True:
            found = _IN_STRING['"'].search(self._text, place)
            if found is not None and found[0] == '"':
                text, self._place = self._text[self._place : found.end()], found.end()
                return text
            if found is not None and found.end() < len(self._text):
                place = found.end() + 1
                continue
            place = len(self._text) if found is None else found.start()
            if self.is_ended:
                self._has_run_out = True
                return None
            yield

    def enclosed(self, opening: str, marks: re.Pattern[str] = _JSON_MARKS) -> Steps[str | None]:
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
                    self._has_run_out = True
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

    def closing(self, *marks: str) -> Steps[bool]:
        """Consume whitespace and one of ``marks``, or what the end has left of them; nothing if none comes."""
        place = self._pin()
        yield from self.blanks()
        found = (yield from self.one_of(marks)) is not None
        if not found and any(self.ends_within(mark) for mark in marks):
            self.take_rest()
            found = True
        self._unpin()
        if not found:
            self._place = place
        return found

    def take_rest(self) -> str:
        """Consume and return the rest of the text, at the end of the message."""
        text, self._place = self._text[self._place :], len(self._text)
        return text

    # ---- text

    def text_until(self, marks: tuple[str, ...], kind: Kind = "content") -> Steps[str | None]:
        """Emit text as it comes, up to the first of ``marks``; consumes and returns the mark, ``None`` if none came."""
        sought = (*marks, *self.strays) if kind == "content" else marks
        while True:
            found = _pattern(sought).search(self._text, self._place)
            if found is not None:
                text, self._place = self._text[self._place : found.start()], found.start()
                self.emit(kind, text)
                self._place = found.end()
                if found[0] in marks:
                    return found[0]
                self._pass_stray(found[0])
                continue
            end = len(self._text) if self.is_ended and not self._drops_begun else self._begin_of_mark(sought)
            text, self._place = self._text[self._place : end], end
            self.emit(kind, text)
            if self.is_ended:
                self.take_rest()
                return None
            self._forget()
            yield

    @property
    def _drops_begun(self) -> bool:
        """Whether the beginning of a call at the end is neither a call nor content: in a truncated message of calls."""
        return self.is_ended and self.is_cut and self.num_calls > 0

    def _begin_of_mark(self, marks: tuple[str, ...]) -> int:
        """Where text begins that may be the beginning of a mark."""
        end = len(self._text)
        for place in range(max(self._place, end - _longest(marks) + 1), end):
            tail = self._text[place:]
            if any(mark.startswith(tail) for mark in marks):
                return place
        return end

    def _pass_stray(self, mark: str) -> None:
        """A mark of reasoning in the content: text if it opens, if it closes what was opened there, or in code."""
        is_opening = mark == self.strays[0]
        if is_opening or self._is_stray_open or self._last == "`":
            self.emit("content", mark)
            self._is_stray_open = is_opening

    def closes_unopened(self, opens: str, closes: str) -> bool:
        """Whether the rest has ``closes``, not in code, without ``opens`` before it."""
        place = self._text.find(closes, self._place)
        while place > 0 and self._text[place - 1] == "`":
            place = self._text.find(closes, place + 1)
        return place >= 0 and self._text.find(opens, self._place, place) < 0

    def rest(self, kind: Kind = "content") -> Steps[None]:
        """Emit all further text."""
        yield from self.text_until((), kind)

    def emit(self, kind: Kind, text: str) -> None:
        """Emit ``text``, which was consumed last. Trailing whitespace of content is held back, and dropped if a call
        follows."""
        place = self._num_forgotten + self._place - len(text)
        if kind == "reasoning":
            self._append(kind, [(place, text)])
            return
        self._last = text[-1:] or self._last
        if solid := text.rstrip():
            self._append(kind, [*self._blanks, (place, solid)])
            self._blanks = []
        if len(solid) < len(text):
            self._blanks.append((place + len(solid), text[len(solid) :]))

    def _append(self, kind: Kind, parts: list[tuple[int, str]]) -> None:
        """Emit texts with their places as one piece."""
        text = "".join([part for _, part in parts])
        if text and self._held is not None:
            self._holds_text = True
        elif text:
            self.pieces.append(Text(kind, text))
            self.places += [(place, place + len(part)) for place, part in parts]

    def emit_blanks(self) -> None:
        """At the end of the message: emit the whitespace held back, since no call followed."""
        if self._blanks and not self.num_calls:
            self._append("content", self._blanks)
        self._blanks = []

    # ---- calls

    def attempt(self, steps: Steps[object], mark: str = "") -> Steps[bool]:
        """Read the calls that ``mark`` opened; if there are none, emit the mark as content and resume behind it.

        Returns whether there were calls.
        """
        if self._num_failures < MAX_FAILURES:
            if (yield from self.maybe(steps)):
                return True
            self._num_failures += 1
            if self._has_run_out and self._drops_begun:
                return False
        self.emit("content", mark)
        return False

    def maybe(self, steps: Steps[object]) -> Steps[bool]:
        """Read calls; if there are none, nothing is consumed but what is dropped. Returns whether there were calls."""
        num_calls, place = self.num_calls, self._pin()
        self._has_run_out = self._is_empty = False
        yield from steps
        self._unpin()
        if self.num_calls > num_calls or self._is_empty:
            return True
        self._place = len(self._text) if self._has_run_out and self._drops_begun else place
        return False

    def accept_none(self) -> None:
        """The model has written that it makes no calls: there is nothing to read, and no content."""
        self._is_empty = True

    def begin_call(self, name: str) -> None:
        """A call of ``name`` is certain now: text that was read is not looked at again."""
        self._num_pins = 1 if self._held is not None else 0
        self._blanks = []
        self.num_calls += 1
        self._name, self._arguments = name, []
        if self._held is None:
            self.pieces.append(CallProgress(name, ""))

    def add_arguments(self, text: str) -> None:
        """Further arguments of the call that was begun."""
        assert self._name is not None
        if text:
            self._arguments.append(text)
            if self._held is None:
                self.pieces.append(CallProgress(self._name, text))

    @property
    def arguments(self) -> str:
        """Those of the call that was begun, as far as they were read."""
        return "".join(self._arguments)

    def end_call(self, is_cut: bool = False) -> None:
        """The call that was begun is complete or, if ``is_cut``, its arguments are not: the message ended within them,
        or they are no JSON."""
        assert self._name is not None
        call = Call(self._name, "".join(self._arguments), is_cut)
        (self.pieces if self._held is None else self._held).append(call)
        self._name, self._arguments = None, []

    def add_call(self, call: Call) -> None:
        """A call that became certain at once."""
        self.begin_call(call.name)
        self.add_arguments(call.arguments)
        self.end_call(call.is_cut)

    def begins_object(self) -> Steps[bool]:
        """Whether a JSON object comes next, by its first member; of a truncated message, also what may become one."""
        place = self._pin()
        is_object = yield from self._begins_object()
        self._unpin()
        self._place = place
        return is_object

    def _begins_object(self) -> Steps[bool]:
        if not (yield from self.literal("{")):
            return False
        yield from self.blanks()
        first = yield from self.next()
        if first == "}":
            return True
        if first == '"' and (yield from self.string()) is not None:
            yield from self.blanks()
            if not (yield from self.literal(":")):
                return self.is_cut and self._place == len(self._text)
            yield from self.blanks()
            first = yield from self.next()
            return first in _VALUE_STARTS if first else self.is_cut
        return self.is_cut and first in ('"', "")

    def pass_object(self) -> Steps[bool]:
        """Emit a JSON object, whose bracket must come next, as arguments while it is written.

        Only brackets and strings are examined. Control characters in strings, which JSON does not have, are escaped.
        Returns whether it was closed before the message ended.
        """
        place, depth, is_string = self._place, 0, False
        while True:
            found = (_IN_JSON_STRING if is_string else _JSON_MARKS).search(self._text, place)
            if found is None or (found[0] == "\\" and found.end() == len(self._text)):
                place = len(self._text) if found is None or self.is_ended else found.start()
                self.add_arguments(self._text[self._place : place])
                self._place = place
                if self.is_ended:
                    return False
                self._forget()
                place = self._place
                yield
                continue
            place = found.end()
            if found[0] == "\\":
                place += self._text[place] >= " "
            elif found[0] == '"':
                is_string = not is_string
            elif is_string:
                self.add_arguments(self._text[self._place : found.start()] + _escaped(found[0]))
                self._place = place
            else:
                depth += 1 if found[0] in "{[" else -1
            if depth == 0:
                self.add_arguments(self._text[self._place : place])
                self._place = place
                return True

    def pass_value(self, mark: str, following: tuple[str, ...], take: Callable[[str], None]) -> Steps[bool]:
        """Give ``take`` the text of a value up to ``mark``, which is consumed; returns whether it came.

        A ``mark`` belongs to the value unless one of ``following``, perhaps after blanks, or the end comes behind it.
        """
        while True:
            found = self._text.find(mark, self._place)
            if found >= 0:
                take(self._text[self._place : found])
                self._place = found + len(mark)
                place = self._pin()
                is_end = (yield from self.at_end()) or (yield from self.comes(*following))
                is_end = is_end or any(self.ends_within(text) for text in following)
                self._unpin()
                self._place = place
                if is_end:
                    return True
                take(mark)
                continue
            end = self._begin_of_mark((mark,))
            take(self._text[self._place : end])
            self._place = len(self._text) if self.is_ended else end
            if self.is_ended:
                return False
            self._forget()
            yield

    def calls_at_end(self, format: Format, closes: str) -> Steps[bool]:
        """Read calls up to the end of the message.

        Returns whether there were calls and nothing else, no ``closes`` and no truncation; nothing is consumed
        otherwise.
        """
        if self._num_failures >= MAX_FAILURES:
            return False
        place, blanks, num_calls, num_pins = self._pin(), self._blanks[:], self.num_calls, self._num_pins
        held = self._held = []
        self._holds_text = False
        steps, searched = format(self), place
        while True:
            is_read = next(steps, self) is self
            is_closed = self._text.find(closes, searched) >= 0
            if is_read or is_closed or self._holds_text:
                break
            searched = max(place, len(self._text) - len(closes) + 1)
            yield
        steps.close()
        self._held = None
        is_last = is_read and not is_closed and not self._holds_text and not self.is_cut
        if held and is_last and not held[-1].is_cut:
            self._num_pins -= 1
            self.pieces += held
            return True
        self._num_failures += 1
        self._place, self._blanks, self.num_calls, self._num_pins = place, blanks, num_calls, num_pins - 1
        return False


@functools.lru_cache(maxsize=64)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of ``marks``; of several at one position, the first one listed."""
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _longest(marks: tuple[str, ...]) -> int:
    return max(map(len, marks), default=0)


def _escaped(control: str) -> str:
    """A control character as JSON strings have it."""
    return _ESCAPES.get(control) or f"\\u{ord(control):04x}"


class MessageParser:
    """Turns chunks of text into pieces of a message. Text that a format leaves unread is content."""

    def __init__(self, format: Format) -> None:
        self.places: list[tuple[int, int]] = []
        """Of the last pieces; see ``TextReader``."""
        self._reader = TextReader()
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

    def finish(self, is_cut: bool = False, text: str = "") -> list[Piece]:
        """The remaining pieces at the end, after ``text``; ``is_cut`` when the token limit truncated the message."""
        self._reader.feed(text)
        self._reader.is_ended, self._reader.is_cut = True, is_cut
        self._go_on()
        self._reader.emit_blanks()
        return self._taken()

    def _go_on(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self

    def _taken(self) -> list[Piece]:
        pieces, self._reader.pieces = self._reader.pieces, []
        self.places, self._reader.places = self._reader.places, []
        return joined(pieces)
