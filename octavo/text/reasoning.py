"""Reasoning before the answer, between marks such as ``<think>`` and ``</think>``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.text.message_parser import Format, Steps, TextReader
from octavo.types import Mark


class AnswerMarks(NamedTuple):
    """Marks by which the answer is told from the reasoning before it."""

    opens: str
    """Mark with which reasoning begins; empty if every message begins with something else than the answer."""
    closes: tuple[str, ...]
    """Marks behind which the answer begins, once all of them have come in this order."""
    restarts: str = ""
    """Mark that begins another message of the prompt, if ``opens`` is empty."""
    skips: tuple[str, ...] = ()
    """Marks between reasoning and answer that belong to neither."""
    is_begun: bool = False
    """Whether the prompt ends with the beginning of the message, as the client gave it."""


class AnswerStart:
    """Divides a message's text where the answer begins: behind the reasoning and the blanks that follow it."""

    def __init__(self, marks: AnswerMarks, is_inside: bool) -> None:
        self._marks = marks
        self._is_inside = is_inside
        self._num_closed = 0
        """How many of the marks that close reasoning have come."""
        self._has_reasoning = is_inside
        self._is_found = not is_inside and not marks.opens
        self._held = ""
        """Text to examine again: the beginning of a mark or, before any reasoning, of the message."""

    def push(self, text: str) -> tuple[str, str]:
        """What ``text`` adds before the answer, and to the answer."""
        before, text, self._held = "", self._held + text, ""
        while not self._is_found:
            size = self._size_inside(text) if self._is_inside else self._size_outside(text)
            before, text = before + text[:size], text[size:]
            if not size and not self._is_found:
                self._held = text
                return before, ""
        return before, text

    def _size_inside(self, text: str) -> int:
        """How much of ``text`` is reasoning for certain."""
        mark = self._marks.closes[self._num_closed]
        place = text.find(mark)
        if place < 0:
            tails = range(max(0, len(text) - len(mark) + 1), len(text))
            return next((tail for tail in tails if mark.startswith(text[tail:])), len(text))
        self._num_closed += 1
        if self._num_closed == len(self._marks.closes):
            self._num_closed, self._is_inside = 0, False
        return place + len(mark)

    def _size_outside(self, text: str) -> int:
        """How much of ``text`` is before the answer for certain: blanks behind reasoning, and marks."""
        begun = text.lstrip()
        blanks = len(text) - len(begun)
        if self._has_reasoning and blanks:
            return blanks
        after = (self._marks.closes[-1], *self._marks.skips) if self._has_reasoning else ()
        marks = (self._marks.opens, *after)
        for mark in filter(None, marks):
            if begun.startswith(mark):
                self._is_inside = mark == self._marks.opens
                self._has_reasoning = True
                return blanks + len(mark)
            if mark.startswith(begun):
                return 0
        self._is_found = bool(begun)
        return 0

    def flush(self) -> tuple[str, str]:
        """At the end: what was held back before the answer, and of the answer."""
        held, self._held = self._held, ""
        return (held, "") if self._is_inside else ("", held)


def answer_start(marks: AnswerMarks | None, prompt: str | None) -> AnswerStart | None:
    """Finds the answer in a message that follows ``prompt``; ``None`` if all of it is the answer."""
    if marks is None or prompt is None:
        return None
    if marks.opens:
        return AnswerStart(marks, _ends_inside(prompt, marks.opens, marks.closes[-1], marks.is_begun))
    _, begun, rest = prompt.rpartition(marks.closes[0])
    return AnswerStart(marks, not begun or marks.closes[-1] not in rest or marks.restarts in rest)


class Thinking(NamedTuple):
    """How a family of models marks its reasoning."""

    opens: str
    closes: str
    names: tuple[str, ...] = ()
    """Values of ``reasoning_parser``, as in vLLM."""
    answer: tuple[str, str] | None = None
    """Marks around the answer, which are left out of it."""
    signs: tuple[str, ...] = ()
    """Further strings that the chat templates of these models have."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opens, self.closes, *(self.answer or ()))

    @property
    def answer_marks(self) -> AnswerMarks:
        return AnswerMarks(self.opens, (self.closes,), skips=(self.answer or ())[:1])


THINK = Thinking(
    "<think>",
    "</think>",
    (
        *("deepseek_r1", "deepseek_v3", "ernie45", "exaone4", "glm45", "glm47", "holo2", "kimi_k2", "mimo"),
        *("minimax_m2", "nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
    ),
)
FAMILIES = (
    Thinking("[THINK]", "[/THINK]", ("mistral",)),
    Thinking("<seed:think>", "</seed:think>", ("seed_oss",)),
    Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7", ("kimi_vl",)),
    Thinking("<|channel>thought", "<channel|>", ("gemma4",)),
    Thinking(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("cohere_command3", "cohere_command4"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    Thinking("Here is my thought process:", "Here is my response:", ("granite",)),
    Thinking("<think>", "</think>", ("hunyuan_a13b",), ("<answer>", "</answer>")),
    Thinking("<think>", "</think>", ("granite33",), ("<response>", "</response>"), ("<response></response>",)),
    THINK,
)
"""In order of precedence: of several whose marks a template has, the first is chosen."""

BLANKS: tuple[str, ...] = ("\n", "\n\n", "\r\n", "\t", " ", "  ")
"""What may stand before a mark that opens reasoning."""
AROUND = ("", "\n", "\n\n", " ", ".")
"""What may share a token with a mark."""
_TURN = re.compile(r"<[|\uff5c][^\n<>]{1,60}>|<[^\n<>|]{0,20}turn[^\n<>]{0,20}>|\[/?[A-Z]{3,20}\]|</?s>|\]~b\]")
"""Marks between turns in the prompts of many families."""
_SIMILAR = re.compile(r"</([\w:.-]{0,40}(?:think|thought)[\w:.-]{0,40})>")


def thinking_named(name: str) -> Thinking | None:
    """The family of which ``name`` is a parser's name."""
    return next((family for family in FAMILIES if name in family.names), None)


def thinking_shown(template: str) -> Thinking | None:
    """The family whose marks ``template`` has, or marks of its own in the form of ``<think>``."""
    for family in FAMILIES:
        if all(mark in template for mark in (family.closes, *(family.answer or ()), *family.signs)):
            return family
    found = _SIMILAR.search(template)
    return None if found is None else Thinking(f"<{found[1]}>", found[0])


def begins_inside(prompt: str, thinking: Thinking = THINK, is_begun: bool = False) -> bool:
    """Whether a prompt ends inside reasoning: some chat templates append the mark that opens it.

    With ``is_begun`` the prompt ends with the beginning of the message, as the client gave it.
    """
    return _ends_inside(prompt, thinking.opens, thinking.closes, is_begun)


def _ends_inside(prompt: str, opens: str, closes: str, is_begun: bool) -> bool:
    if prompt.rstrip().endswith(opens):
        return True
    _, opened, rest = prompt.rpartition(opens)
    return is_begun and bool(opened) and closes not in rest and _TURN.search(rest) is None


def after_thinking(following: Format, is_inside: bool, thinking: Thinking = THINK) -> Format:
    """A message that may begin with reasoning; ``following`` reads the rest.

    ``is_inside``: the prompt has opened the reasoning already. The model may open it again, and may think several
    times before the answer. Calls with which a message ends are calls even if its reasoning is not closed.
    """
    opens, closes = thinking.opens, thinking.closes

    def read(reader: TextReader) -> Steps[None]:
        # Text that has already come is not taken back: an unopened mark tells nothing of it unless all is there.
        is_open = is_inside or (reader.is_ended and reader.closes_unopened(opens, closes))
        while (yield from reader.leading(opens)) or is_open:
            is_open = False
            while (yield from reader.leading(opens)):
                pass
            if not (yield from _read_thought(reader, following, closes)):
                return
        reader.strays = (opens, closes)
        if thinking.answer is not None and (yield from reader.leading(thinking.answer[0])):
            reader.strays += thinking.answer[1:]
        yield from following(reader)

    return Format(read)


def _read_thought(reader: TextReader, following: Format, closes: str) -> Steps[bool]:
    """Reasoning up to ``closes`` and the blanks behind it; returns whether it was closed."""
    while (mark := (yield from reader.text_until((closes, *following.opens), "reasoning"))) != closes:
        if mark is None:
            return False
        reader.step_back(mark)
        if (yield from reader.calls_at_end(following, closes)):
            return False
        yield from reader.literal(mark)
        reader.emit("reasoning", mark)
    yield from reader.blanks()
    while (yield from reader.literal(closes)):
        yield from reader.blanks()
    return True


content_only = Format(TextReader.rest)
"""A message of content only."""


def mark_of(text: str, encode: Callable[[str], Sequence[int]]) -> Mark:
    """A mark in the tokens that ``encode`` gives: a tokenizer may merge its ends with what is around it."""
    alone = tuple(encode(text))
    found = {alone: None}
    for before, after in itertools.product(AROUND, AROUND):
        tokens, lead = tuple(encode(before + text + after)), tuple(encode(before))
        tokens = tokens[len(lead) :] if tokens[: len(lead)] == lead else tokens
        if tokens[: len(alone)] != alone:
            found[tokens] = None
    return tuple(found)
