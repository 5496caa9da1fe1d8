"""gpt-oss's harmony format: reasoning, preambles, calls and the answer on channels of one message.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from octavo.grammar.forms import literal
from octavo.text.message_parser import MAX_HEAD, Call, Steps, TextReader
from octavo.text.reasoning import AnswerMarks
from octavo.text.tool_calls.json_calls import read_arguments
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of
from octavo.text.tool_calls.values import Functions

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CALL = "<|call|>"
ENDS = ("<|end|>", CALL, "<|return|>", START)
ANSWER = AnswerMarks("", (f"{CHANNEL}final", MESSAGE), START)
HEADER = f"{START}assistant"
REASONING = (f"{CHANNEL}analysis{MESSAGE}", "<|end|>", f"{HEADER}{CHANNEL}final{MESSAGE}")
"""What opens reasoning, what closes it, and what is forced then where it is too long: the beginning of an answer."""
FUNCTIONS = "functions."

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_HEADER_ALONE = re.compile(
    rf"(?=\s*(?:{re.escape(START)}|{re.escape(CHANNEL)})).{{0,{MAX_HEAD + len(MESSAGE)}}}", re.DOTALL
)
"""A header at the end of a message, no longer than one is waited for: behind a longer one all is content."""


def _read(functions: Functions) -> Callable[[TextReader], Steps[None]]:
    def read(reader: TextReader) -> Steps[None]:
        while (header := (yield from reader.until(MESSAGE, CALL))) is not None:
            channel, recipient = _CHANNEL.search(header[0]), _RECIPIENT.search(header[0])
            name = "" if recipient is None else recipient[1]
            is_call = name.startswith(FUNCTIONS) or name in functions
            if is_call and header[1] == CALL:
                reader.step_back(CALL)
            if is_call and (yield from reader.attempt(_read_call(reader, name.removeprefix(FUNCTIONS)))):
                continue
            if header[1] == CALL:
                continue  # a header alone, and a call only if its arguments may be missing
            is_thinking = channel is not None and channel[1] == "analysis"
            end = yield from reader.text_until((*ENDS, CHANNEL), "reasoning" if is_thinking else "content")
            if end is None:
                return
            if end == CHANNEL:  # models may leave the end of the message before it out
                reader.step_back(end)
        if reader.remains(_HEADER_ALONE):
            reader.take_rest()
        else:
            yield from reader.closing(START, CHANNEL)

    return read


def _read_call(reader: TextReader, name: str) -> Steps[None]:
    yield from read_arguments(reader, name, *ENDS)
    yield from reader.closing(*ENDS)


def _write(calls: Sequence[Call]) -> str:
    return HEADER.join(map(_written, calls))


def _written(call: Call) -> str:
    return f"{CHANNEL}commentary to={FUNCTIONS}{call.name} {CONSTRAIN}json{MESSAGE}{call.arguments}{CALL}"


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
    models="gpt-oss",
    message=_read,
    rules=_rules,
    opens=CHANNEL,
    marks=(START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
    signs=((CHANNEL, MESSAGE),),
    write=_write,
)
