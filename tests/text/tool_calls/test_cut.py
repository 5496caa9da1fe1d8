"""Calls in messages that were cut: what is there of them comes back as calls, wherever the message was cut."""

from __future__ import annotations

import json

import pytest

from octavo.text.message_parser import Call, MessageParser, Piece, Text
from octavo.text.tool_calls.deepseek import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR
from octavo.text.tool_calls.tool_format import long_id
from octavo_server.dialects.openai.chat import ChatMessage
from octavo_server.dialects.openai.constraints import ToolChoice, tool_use
from tests.text.tool_calls.messages import FORMATS, analysis, joined, v3

FIRST, SECOND = '{"a": {"b": [1, "x\\"}"]}, "c": 2}', "{}"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "get_weather")]


def object_of(key: str) -> list[str]:
    pairs = (("f", FIRST), ("get_weather", SECOND))
    return [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in pairs]


MESSAGES = {
    "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in object_of("arguments")),
    "think, hermes": "<think>Hm.</think>\n" + f"<tool_call>\n{object_of('arguments')[0]}\n</tool_call>",
    "llama3": "; ".join(object_of("parameters")),
    "mistral": f"[TOOL_CALLS][{', '.join(object_of('arguments'))}]",
    "mistral ": f"[TOOL_CALLS]f[ARGS]{FIRST}[TOOL_CALLS]get_weather[ARGS]{SECOND}",
    "pythonic": f"[f(**{FIRST}), get_weather(**{SECOND})]",
    "deepseek": f"{ALL_BEGIN}{v3('f', FIRST)}\n{v3('get_weather', SECOND)}{ALL_END}",
    "deepseek ": f"{ALL_BEGIN}{BEGIN}f{SEPARATOR}{FIRST}{END}{BEGIN}get_weather{SEPARATOR}{SECOND}{END}{ALL_END}",
    "harmony": analysis("Hm.") + f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{FIRST}<|call|>",
}
"""By format: calls as a grammar has the model write them. A blank tells two of one format apart."""


def read(format: str, texts: list[str], choice: ToolChoice) -> list[Piece]:
    tools = tool_use(TOOLS, choice, True)
    message = ChatMessage(MessageParser(FORMATS[format.strip()]), long_id, tools)
    reasons = [None] * (len(texts) - 1) + ["length"]
    return joined([p for text, reason in zip(texts, reasons, strict=True) for p in message.pieces(text, reason)])


@pytest.mark.parametrize("format", MESSAGES)
def test_what_was_written_of_calls_is_kept_wherever_a_message_is_cut(format: str) -> None:
    whole = MESSAGES[format]
    most = 0
    for end in range(len(whole) + 1):
        text = whole[:end]
        pieces = read(format, [text], "required")
        assert read(format, list(text) or [""], "required") == pieces
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        assert all(piece.kind == "reasoning" for piece in pieces if isinstance(piece, Text)), text
        for call, name, arguments in zip(calls, ("f", "get_weather"), (FIRST, SECOND), strict=False):
            assert call.name == name
            assert arguments.startswith(call.arguments)
            assert call.is_cut or json.loads(call.arguments) == json.loads(arguments)
        assert not any(call.is_cut for call in calls[:-1])
        written = sum(len(call.arguments) for call in calls)
        assert written >= most, "arguments were lost"
        assert (written > 0) == (end > whole.index(FIRST))
        most = written
    assert most == len(FIRST) + (len(SECOND) if "get_weather" in whole else 0)


@pytest.mark.parametrize("format", MESSAGES)
def test_a_function_by_name_is_called_even_if_its_name_is_cut(format: str) -> None:
    whole = MESSAGES[format]
    begins = whole.index("</think>") + 10 if "</think>" in whole else whole.rfind("<|channel|>") + 12
    for text in (whole[:end] for end in range(max(begins, 2), whole.index(FIRST))):
        calls = [
            p for p in read(format, [text], {"type": "function", "function": {"name": "f"}}) if isinstance(p, Call)
        ]
        if format != "harmony":  # whose headers are never content
            assert calls == [Call("f", "", is_cut=True)], text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "a <tool_call> b"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1'),
        ("hermes", '<tool_call>{"name": "f", "other": {"a'),
        ("llama3", '{"name": "Bob", "parameters": {"a'),
        ("llama3", '{"answer": [1'),
        ("mistral", "[TOOL_CALLS][1, 2"),
        ("pythonic", "[1, 2"),
        ("pythonic", '[g(**{"a'),
        ("harmony", "<|channel|>commentary to=functions.f json<|message|>not JSON"),
    ],
)
def test_what_is_not_the_beginning_of_a_call_stays_content(format: str, text: str) -> None:
    pieces = read(format, [text], "auto")
    assert pieces == [Text("content", text.removeprefix("<|channel|>commentary to=functions.f json<|message|>"))]


def test_a_message_that_ends_by_itself_has_no_half_calls() -> None:
    text = MESSAGES["hermes"][:40]
    parser = MessageParser(FORMATS["hermes"])
    assert [*parser.push(text), *parser.finish()] == [Text("content", text)]
