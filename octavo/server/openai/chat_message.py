"""The assistant's message of a chat completion that may contain reasoning or tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from octavo.server.openai.tools import ToolUse
from octavo.text.message_format import MessageFormat
from octavo.text.reader import Call, CallProgress, MessageParser, Piece, Text

REASONING_KEYS = ("reasoning_content", "reasoning")
"""Both are sent: clients read one or the other."""


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
            found += self._without_markup(last) if is_cut else last
        kept: list[Piece] = []
        for piece in found:
            if isinstance(piece, Call | CallProgress):
                if self._num_calls and self._tools is not None and not self._tools.is_parallel:
                    continue
                self._num_calls += isinstance(piece, Call)
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            kept.append(piece)
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
                text = piece.text if isinstance(piece, CallProgress) else "" if self._is_call_open else piece.arguments
                if not self._is_call_open:
                    function = {"name": piece.name, "arguments": ""}
                    opened = {"index": index, "id": self._new_id(), "type": "function", "function": function}
                    yield {"tool_calls": [opened]}
                if text:
                    yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
                self._is_call_open = isinstance(piece, CallProgress)
                index += not self._is_call_open
            elif piece.kind == "reasoning":
                yield dict.fromkeys(REASONING_KEYS, piece.text)
            else:
                yield {"content": piece.text}

    def unstreamed(self, pieces: list[Piece]) -> dict[str, Any]:
        """The complete message."""
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text) and piece.kind == "content")
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": self._new_id(), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
            ]
        if self.reasoning:
            message |= dict.fromkeys(REASONING_KEYS, self.reasoning)
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` instead of ``stop`` when there are calls, unless the client named the function."""
        is_named = self._tools is not None and self._tools.mode == "named"
        return "tool_calls" if reason == "stop" and self._num_calls and not is_named else reason


def chat_message(
    format: MessageFormat, tools: ToolUse | None, prompt: str, is_begun: bool = False, is_streamed: bool = True
) -> ChatMessage | None:
    """A parser for the message after ``prompt``, which may end with its beginning; ``None`` when all is content."""
    functions = None if tools is None else {tool.name: tool.parameters for tool in tools.allowed}
    reader = format.reader(functions, prompt, is_begun)
    return None if reader is None else ChatMessage(MessageParser(reader), format.new_id, tools, is_streamed)
