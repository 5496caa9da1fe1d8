"""Rendering of messages, unstreamed or as events.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from octavo.errors import RequestError
from octavo.text.message_parser import Call, CallProgress, Piece, Text
from octavo_server.dialects.chat_reply import ChatReply, members_of
from octavo_server.generation import GeneratedChoice
from octavo_server.http.error_responses import TEXT, ErrorForm, object_of
from octavo_server.http.response import EventStream, encode_line
from octavo_server.pipeline import Answer

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}

OPEN: dict[str, str | None] = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
"""Fields of an unfinished message. The API includes every key in every message, also those that are always null without
server-side tools."""


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The body of an error response; the type is derived from the status."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


_SCHEMA = object_of(type={"const": "error"}, error=object_of(type=TEXT, message=TEXT))
ERRORS = ErrorForm("AnthropicError", _SCHEMA, anthropic_error, ("/v1/messages",))


class MessageAnswer(Answer):
    """Renders one reply, unstreamed or as events. Includes reasoning if ``shows_thinking``."""

    def __init__(self, reply: ChatReply, id: str, model: str, shows_thinking: bool, max_tokens: int) -> None:
        """``max_tokens`` is the limit that the client asked for, which may be more than fits the context."""
        self._reply = reply
        self._model = model
        self._shows_thinking = shows_thinking
        self._max_tokens = max_tokens
        self.id = id
        self._has_calls = False
        self._kind = ""
        """Type of the open block, or ""."""
        self._index = -1
        self._is_call_open = False
        """Whether the arguments of a call are being streamed."""

    # --- unstreamed ---

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        """The message, once its choice is finished."""
        blocks: list[dict[str, Any]] = []
        for piece in self._pieces():
            if isinstance(piece, CallProgress):
                continue
            block = _block(piece)
            last = blocks[-1] if blocks else None
            if not isinstance(piece, Call) and last is not None and last["type"] == block["type"]:
                key = _text_key(block)
                last[key] += piece.text
            else:
                if isinstance(piece, Call):
                    block["input"] = members_of(piece)
                else:
                    block[_text_key(block)] = piece.text
                blocks.append(block)
        choice = self._reply.choice
        return {**self._message(), "content": blocks, **self._end(choice), "usage": self._usage(choice), **choice.ids}

    def _pieces(self) -> list[Piece]:
        pieces = self._reply.pieces()
        self._has_calls = self._has_calls or any(isinstance(piece, Call) for piece in pieces)
        return pieces if self._shows_thinking else [p for p in pieces if isinstance(p, Call) or p.kind != "reasoning"]

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}

    def _end(self, choice: GeneratedChoice) -> dict[str, str | None]:
        """The fields that say why the message ended."""
        reason, sequence = choice.finish_reason, choice.stop_reason
        if reason == "stop" and isinstance(sequence, str):
            return {**OPEN, "stop_reason": "stop_sequence", "stop_sequence": sequence}
        if reason == "stop" and self._has_calls:
            return {**OPEN, "stop_reason": "tool_use"}
        if reason == "length" and choice.num_tokens < self._max_tokens:
            return {**OPEN, "stop_reason": "model_context_window_exceeded"}
        return {**OPEN, "stop_reason": STOP_REASONS.get(reason or "")}

    @staticmethod
    def _usage(choice: GeneratedChoice) -> dict[str, Any]:
        """Token counts; cached prompt tokens are counted separately from the other prompt tokens."""
        return {
            "input_tokens": len(choice.prompt.tokens) - choice.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.num_cached_tokens,
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"thinking_tokens": choice.num_reasoning_tokens},
            **dict.fromkeys(("cache_creation", "server_tool_use", "service_tier", "inference_geo")),
        }

    # --- streamed ---

    def frames(self, choice: GeneratedChoice) -> bytes:
        """The events for new output."""
        data = b""
        if self._index < 0:
            self._index = 0
            usage = {**self._usage(choice), "output_tokens": 0}
            start = {**self._message(), "content": [], **OPEN, "usage": usage}
            data = event("message_start", message=start)
        for piece in self._pieces():
            data += b"".join(self._piece_events(piece))
        if choice.finish_reason is not None:
            data += self._close()
            data += event("message_delta", delta=self._end(choice), usage=self._usage(choice), **choice.ids)
            data += event("message_stop")
        return data

    def _piece_events(self, piece: Piece) -> Iterator[bytes]:
        block = _block(piece)
        if isinstance(piece, Call) and self._is_call_open:
            self._is_call_open = False
            yield self._close()
            return
        if not isinstance(piece, Text):
            text = piece.arguments if isinstance(piece, Call) else piece.text
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block["type"] == "thinking":
            delta = {"type": "thinking_delta", "thinking": piece.text}
        else:
            delta = {"type": "text_delta", "text": piece.text}
        if not self._is_call_open and (not isinstance(piece, Text) or self._kind != block["type"]):
            yield self._close()
            self._kind = block["type"]
            yield event("content_block_start", index=self._index, content_block=block)
        self._is_call_open = isinstance(piece, CallProgress)
        yield event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        """End the open block, if any."""
        if not self._kind:
            return b""
        data = event("content_block_stop", index=self._index)
        self._kind = ""
        self._index += 1
        return data


class MessageStream(EventStream):
    """Named events without a final ``[DONE]``."""

    END = b""

    def error_frames(self, error: RequestError) -> bytes:
        return event("error", **anthropic_error(error))


def event(kind: str, **members: Any) -> bytes:
    """One event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_line({"type": kind, **members}))


def _text_key(block: dict[str, Any]) -> str:
    return "thinking" if block["type"] == "thinking" else "text"


def _block(piece: Piece) -> dict[str, Any]:
    """The empty block that a piece begins."""
    if not isinstance(piece, Text):
        id = f"toolu_{uuid.uuid4().hex[:24]}"
        return {"type": "tool_use", "id": id, "name": piece.name, "input": {}, "caller": {"type": "direct"}}
    if piece.kind == "reasoning":
        # Clients send reasoning back with its signature, which this server does not check.
        return {"type": "thinking", "thinking": "", "signature": ""}
    # The AI SDK takes a list there, or nothing, and Anthropic's schema a list or null, and not nothing.
    return {"type": "text", "text": "", "citations": []}
