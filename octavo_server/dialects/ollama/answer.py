"""Rendering of answers, as one object or as lines of JSON."""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Callable
from typing import Any

from octavo.errors import RequestError
from octavo.text.message_parser import Call, Piece, Text
from octavo.text.tool_calls.tool_format import long_id
from octavo.types import TokenLogprobs
from octavo_server.dialects.chat_reply import members_of
from octavo_server.dialects.ollama.body import CommonBody
from octavo_server.dialects.openai.answer_parts import TokenNames, chat_logprobs
from octavo_server.generation import GeneratedChoice
from octavo_server.http.error_responses import TEXT, ErrorForm, object_of
from octavo_server.http.response import EventStream, encode_line
from octavo_server.pipeline import Answer


def ollama_error(error: RequestError) -> dict[str, Any]:
    """The body of an error response."""
    return {"error": error.message}


ERRORS = ErrorForm("OllamaError", object_of(error=TEXT), ollama_error, ("/api",))


class OllamaAnswer(Answer):
    """Renders one choice. ``wrapped`` makes the members of an object that hold a piece of the answer."""

    def __init__(
        self,
        pieces: Callable[[], list[Piece]],
        logprobs: list[TokenLogprobs],
        body: CommonBody,
        names: TokenNames,
        wrapped: Callable[[dict[str, Any]], dict[str, Any]],
        started: float,
    ) -> None:
        self._pieces = pieces
        self._logprobs = logprobs
        """Of the tokens that the pieces so far were made of, until they are shown."""
        self._body = body
        self._names = names
        self._wrapped = wrapped
        self._started = started
        """Of the request, in seconds of ``time.monotonic``."""
        self.id = f"ollama-{uuid.uuid4().hex}"

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        """The whole answer, once its choice is finished."""
        parts = {"content": "", "thinking": ""}
        calls = []
        for piece in self._pieces():
            if isinstance(piece, Call):
                calls.append(_call(piece))
            elif isinstance(piece, Text):
                parts[_key(piece)] += piece.text
        shown: dict[str, Any] = {name: text for name, text in parts.items() if text or name == "content"}
        return self._object({**shown, "tool_calls": calls} if calls else shown, choices[0])

    def frames(self, choice: GeneratedChoice) -> bytes:
        """A line for each new piece, and a last one once finished."""
        data = b""
        for piece in self._pieces():
            if isinstance(piece, Call):
                part: dict[str, Any] = {"content": "", "tool_calls": [_call(piece)]}
            elif isinstance(piece, Text):
                part = {"content": "", _key(piece): piece.text}
            else:
                continue  # calls come whole in this API
            data += encode_line(self._object(part)) + b"\n"
        if choice.finish_reason is not None:
            data += encode_line(self._object({"content": ""}, choice)) + b"\n"
        return data

    def _object(self, part: dict[str, Any], ended: GeneratedChoice | None = None) -> dict[str, Any]:
        """A piece of the answer, or its end with counts and times in nanoseconds."""
        result = {"model": self._body.model, "created_at": now(), **self._wrapped(part), "done": ended is not None}
        if self._logprobs:
            result["logprobs"] = chat_logprobs(self._logprobs, self._names, self._body.top_logprobs)["content"]
            self._logprobs.clear()
        if ended is not None:
            end, arrival = time.monotonic(), ended.request.arrival
            first = ended.first_token_time or end
            result |= {
                "done_reason": ended.finish_reason,
                "total_duration": _nanoseconds(end - self._started),
                "load_duration": _nanoseconds(arrival - self._started),
                "prompt_eval_count": len(ended.prompt.tokens),
                "prompt_eval_duration": _nanoseconds(first - arrival),
                "eval_count": ended.num_tokens,
                "eval_duration": _nanoseconds(end - first),
                **ended.ids,
            }
        return result


class LineStream(EventStream):
    """Lines of JSON. Nothing is sent in silence: clients read every line as an object."""

    CONTENT_HEADERS = {"Content-Type": "application/x-ndjson"}
    KEEP_ALIVE = b""
    END = b""

    def error_frames(self, error: RequestError) -> bytes:
        return encode_line(ollama_error(error)) + b"\n"


def now() -> str:
    """The time as this API writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def as_message(part: dict[str, Any]) -> dict[str, Any]:
    """A piece of a chat's answer."""
    return {"message": {"role": "assistant", **part}}


def as_response(part: dict[str, Any]) -> dict[str, Any]:
    """A piece of a generated text."""
    text, thinking = part["content"], part.get("thinking")
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


def _key(piece: Text) -> str:
    return "thinking" if piece.kind == "reasoning" else "content"


def _call(piece: Call) -> dict[str, Any]:
    return {"id": long_id(), "function": {"name": piece.name, "arguments": members_of(piece)}}


def _nanoseconds(seconds: float) -> int:
    """At least one: clients divide by times."""
    return max(1, round(seconds * 1e9))
