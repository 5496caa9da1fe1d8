"""The assistant's message of a chat completion that may contain reasoning or tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from octavo.text import reasoning
from octavo.text.chat_messages import ANSWER_REASONING_KEYS
from octavo.text.message_format import MessageFormat
from octavo.text.reader import Call, CallProgress, MessageParser, Piece, Text
from octavo_server.dialects.openai.constraints import ToolUse, arguments_of, input_of


class ChatMessage:
    """Parses one choice's text into a message."""

    def __init__(
        self, parser: MessageParser, new_id: Callable[[], str], tools: ToolUse | None, is_streamed: bool = True
    ) -> None:
        """A message that is not streamed is read with all of its text at hand; see ``after_thinking``."""
        self._parser = parser
        self._is_streamed = is_streamed
        self._new_id = new_id
        self._tools = tools
        self._num_calls = 0
        self._input: list[str] | None = None if tools is None or tools.content_as_input is None else []
        """Content so far, if it is the input of a custom tool."""
        self._custom_names = frozenset[str]() if tools is None else tools.custom_names
        self._is_call_open = False
        """Whether the stream has the beginning of a call."""
        self.reasoning = ""
        """All reasoning text so far."""

    def pieces(self, text: str, finish_reason: str | None) -> list[Piece]:
        """Pieces that became certain with ``text``; only the first call unless parallel calls are allowed.

        ``finish_reason`` is ``None`` while more text may come.
        """
        is_last, is_cut = finish_reason is not None, finish_reason == "length"
        found = self._parser.push(text) if self._is_streamed or not is_last else []
        if is_last:
            last = self._parser.finish(is_cut, "" if self._is_streamed else text)
            found += self._without_markup(last) if is_cut and self._input is None else last
        if self._input is not None:
            found = self._with_input(found, self._input, finish_reason)
        kept: list[Piece] = []
        for piece in found:
            if isinstance(piece, CallProgress) and piece.name in self._custom_names:
                continue  # its text is within JSON, and is told once that is complete
            if isinstance(piece, Call | CallProgress):
                if self._num_calls and self._tools is not None and not self._tools.is_parallel:
                    continue
                self._num_calls += isinstance(piece, Call)
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            kept.append(piece)
        return kept

    def _with_input(self, pieces: list[Piece], text: list[str], finish_reason: str | None) -> list[Piece]:
        """``pieces`` without the content, which is added to ``text``; at the end a call with it."""
        assert self._tools is not None
        text += [piece.text for piece in pieces if isinstance(piece, Text) and piece.kind == "content"]
        kept: list[Piece] = [piece for piece in pieces if isinstance(piece, Text) and piece.kind == "reasoning"]
        if finish_reason in ("stop", "length"):
            kept.append(Call(self._tools.allowed[0].name, arguments_of("".join(text)), finish_reason == "length"))
        return kept

    def _without_markup(self, pieces: list[Piece]) -> list[Piece]:
        """The last pieces of a truncated message. If a call is required, text that is not a call is the truncated
        beginning of one, before its name is complete."""
        if self._tools is None or not self._tools.must_call:
            return pieces
        kept = [piece for piece in pieces if isinstance(piece, Call) or piece.kind != "content"]
        has_begun = len(kept) < len(pieces) and not self._num_calls and not any(isinstance(p, Call) for p in kept)
        if has_begun and len(self._tools.allowed) == 1:
            kept.append(Call(self._tools.allowed[0].name, "", is_cut=True))
        return kept

    def deltas(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Stream deltas; a call's id and name precede its arguments."""
        index = self._num_calls - sum(isinstance(piece, Call) for piece in pieces)
        for piece in pieces:
            if isinstance(piece, Call | CallProgress):
                kind, key, written = self._written(piece)
                if not self._is_call_open:
                    opened = {"index": index, "id": self._new_id(), "type": kind, kind: {"name": piece.name, key: ""}}
                    yield {"tool_calls": [opened]}
                if written and not (self._is_call_open and isinstance(piece, Call)):
                    yield {"tool_calls": [{"index": index, kind: {key: written}}]}
                self._is_call_open = isinstance(piece, CallProgress)
                index += not self._is_call_open
            elif piece.kind == "reasoning":
                yield dict.fromkeys(ANSWER_REASONING_KEYS, piece.text)
            else:
                yield {"content": piece.text}

    def unstreamed(self, pieces: list[Piece]) -> dict[str, Any]:
        """The complete message."""
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text) and piece.kind == "content")
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = []
            for call in calls:
                kind, key, written = self._written(call)
                called = {"id": self._new_id(), "type": kind, kind: {"name": call.name, key: written}}
                message["tool_calls"].append(called)
        if self.reasoning:
            message |= dict.fromkeys(ANSWER_REASONING_KEYS, self.reasoning)
        return message

    def _written(self, call: Call | CallProgress) -> tuple[str, str, str]:
        """The type of a call, the member that says with what it calls, and that member's text."""
        if isinstance(call, CallProgress):
            return "function", "arguments", call.text
        if call.name in self._custom_names:
            return "custom", "input", input_of(call.arguments)
        return "function", "arguments", call.arguments

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` instead of ``stop`` when there are calls, unless the client named the function."""
        is_named = self._tools is not None and self._tools.mode == "named"
        return "tool_calls" if reason == "stop" and self._num_calls and not is_named else reason


def chat_message(
    format: MessageFormat, tools: ToolUse | None, prompt: str, is_begun: bool = False, is_streamed: bool = True
) -> ChatMessage | None:
    """A parser for the message after ``prompt``, which may end with its beginning; ``None`` when all is content."""
    is_input = tools is not None and tools.content_as_input is not None
    functions = None if tools is None or is_input else {tool.name: tool.parameters for tool in tools.allowed}
    reader = format.reader(functions, prompt, is_begun)
    if is_input:
        reader = reader or reasoning.content_only
    return None if reader is None else ChatMessage(MessageParser(reader), format.new_id, tools, is_streamed)
