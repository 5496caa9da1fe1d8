"""gpt-oss's harmony format: reasoning, preambles, calls and the answer on channels of one message.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.reader import Call, Format, Reader, Steps
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of
from octavo.text.tool_calls.values import cut_call, make_call, value_of

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
FUNCTIONS = "functions."

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def _read(names: frozenset[str]) -> Format:
    return _read_message


def _read_message(reader: Reader) -> Steps[None]:
    while (header := (yield from reader.until((MESSAGE,)))) is not None:
        channel, recipient = _CHANNEL.search(header[0]), _RECIPIENT.search(header[0])
        if recipient and recipient[1].startswith(FUNCTIONS):
            name = recipient[1].removeprefix(FUNCTIONS)
            if (yield from reader.attempt(functools.partial(_read_call, name))):
                continue
        is_thinking = channel is not None and channel[1] == "analysis"
        if (yield from reader.text_until(ENDS, "reasoning" if is_thinking else "content")) is None:
            return
    yield from reader.drop_header((START, CHANNEL))


def _read_call(name: str, reader: Reader) -> Steps[list[Call] | None]:
    yield from reader.blanks()
    text = yield from reader.json()
    if text is None:
        call = cut_call(name, reader.take_cut()) if reader.is_cut else None
        return None if call is None else [call]
    call = make_call(name, value_of(text))
    if call is None:
        return None
    if (yield from reader.at_end()):
        return [call]
    for mark in ENDS:
        if (yield from reader.literal(mark)):
            return [call]
    return [call] if reader.take_cut() else None


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    constrain, message = marks.lark(CONSTRAIN), marks.lark(MESSAGE)
    heads = [
        f"{marks.lark(CHANNEL)} {literal(f'commentary to={FUNCTIONS}{name} ')} {constrain} {literal('json')} {message}"
        for name in names
    ]
    return f"calls: {one_of(heads, '')}\n"


def answer_rule(marks: Marks, body: str) -> str:
    """Lark for an answer whose text is the rule ``body``."""
    return f"{marks.lark(CHANNEL)} {literal('final')} {marks.lark(MESSAGE)} {body}"


def thinking_rule(marks: Marks) -> str:
    """Lark for the reasoning before the answer, up to the answer's header."""
    opened = f"{marks.lark(CHANNEL)} {literal('analysis')} {marks.lark(MESSAGE)}"
    return f"{opened} /(.|\\n)*/ {marks.lark(ENDS[0])} {marks.lark(START)} {literal('assistant')}"


HARMONY = ToolFormat(
    name="openai",
    read=_read,
    rules=_rules,
    opens=CHANNEL,
    marks=(START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
    signs=(CHANNEL, MESSAGE),
)
