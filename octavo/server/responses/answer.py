"""Rendering of responses, unstreamed or as events with sequence numbers.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from octavo.errors import RequestError
from octavo.server.chat_reply import ChatReply
from octavo.server.generation import Choice
from octavo.server.openai.rendering import encode_line
from octavo.server.responses.body import ResponseBody
from octavo.server.responses.items import Item
from octavo.server.sse import EventStream
from octavo.text.reader import Call, Piece

PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def begun(body: ResponseBody, model: str, sampling_defaults: Mapping[str, float], is_parallel: bool) -> dict[str, Any]:
    """The response object at the start; it echoes the request's fields, with the defaults that were chosen for absent
    ones."""
    chosen = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, **sampling_defaults}
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "frequency_penalty": chosen["frequency_penalty"],
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": is_parallel if body.parallel_tool_calls is None else body.parallel_tool_calls,
        "presence_penalty": chosen["presence_penalty"],
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": chosen["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": chosen["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def failed(response: dict[str, Any], error: RequestError) -> None:
    """Mark the response object as failed."""
    response["status"] = "failed"
    # The API defines a fixed list of codes, which includes these two.
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    response["error"] = {"code": code, "message": error.message}
    response["completed_at"] = None


class ResponseAnswer:
    """Renders one reply as a response object and as events."""

    def __init__(self, response: dict[str, Any], reply: ChatReply) -> None:
        self.response = response
        self._reply = reply
        self._number = 0
        self._is_open = False
        """Whether the last output item is unfinished."""

    def finish(self) -> dict[str, Any]:
        """The final response object, once the choice is finished."""
        for _ in self._events():
            pass
        return self.response

    def frames(self, choice: Choice) -> bytes:
        """The events for new output."""
        return b"".join(self._events())

    def last_frames(self) -> bytes:
        """The final event, once the choice is finished."""
        return self._event(f"response.{self.response['status']}", response=self.response)

    def failure(self, error: RequestError) -> bytes:
        """The event that reports an error."""
        failed(self.response, error)
        return self._event("response.failed", response=self.response)

    def _events(self) -> Iterator[bytes]:
        choice = self._reply.choice
        if not self._number:
            self.response["status"] = "in_progress"
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)
        for piece in self._reply.pieces():
            yield from self._piece(piece)
        if choice.finish_reason is not None:
            is_cut = choice.finish_reason == "length"
            yield from self._close("incomplete" if is_cut else "completed")
            self._end(choice, is_cut)

    def _end(self, choice: Choice, is_cut: bool) -> None:
        response, num_prompt = self.response, len(choice.prompt.tokens)
        response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": choice.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
            "total_tokens": num_prompt + choice.num_tokens,
        }

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Call):
            yield from self._close("completed")
            yield from self._call(piece)
            return
        kind = "message" if piece.kind == "content" else "reasoning"
        output = self.response["output"]
        if not self._is_open or output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        item = output[-1]
        item["content"][0]["text"] += piece.text
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{PART_TYPES[kind]}.delta", **self._place(), delta=piece.text, **extra)

    def _open(self, kind: str) -> Iterator[bytes]:
        """Begin an output item with one text part."""
        part: dict[str, Any] = {"type": PART_TYPES[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            item: Item = {"type": kind, "id": new_id("msg"), "role": "assistant", "status": "in_progress"}
        else:
            item = {"type": kind, "id": new_id("rs"), "summary": [], "status": "in_progress"}
        self._is_open = True
        yield self._added({**item, "content": []})
        self.response["output"][-1]["content"] = [part]
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the open output item."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.response["output"][-1]
        item["status"] = status
        part = item["content"][0]
        extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **extra)
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._done(item)

    def _call(self, call: Call) -> Iterator[bytes]:
        item: Item = {
            "type": "function_call",
            "id": new_id("fc"),
            "call_id": new_id("call"),
            "name": call.name,
            "arguments": call.arguments,
            "status": "incomplete" if call.is_cut else "completed",
        }
        yield self._added({**item, "arguments": "", "status": "in_progress"})
        self.response["output"][-1] = item
        place = {"item_id": item["id"], "output_index": len(self.response["output"]) - 1}
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        done = {**place, "name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **done)
        yield self._done(item)

    def _added(self, item: Item) -> bytes:
        output = self.response["output"]
        output.append(item)
        return self._event("response.output_item.added", output_index=len(output) - 1, item=item)

    def _done(self, item: Item) -> bytes:
        index = len(self.response["output"]) - 1
        return self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, Any]:
        output = self.response["output"]
        return {"item_id": output[-1]["id"], "output_index": len(output) - 1, "content_index": 0}

    def _event(self, kind: str, **members: Any) -> bytes:
        data = encode_line({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class ResponseStream(EventStream):
    """Named events without a final ``[DONE]``."""

    END = b""

    def __init__(
        self, reply: ChatReply, answer: ResponseAnswer, headers: Mapping[str, str], keep: Callable[[], Awaitable[None]]
    ) -> None:
        """``keep`` stores the response before the final event is sent, which reports a failure if ``keep`` raises
        ``RequestError``."""
        super().__init__(reply.generation, answer, headers)
        self._answer = answer
        self._keep = keep

    def error_frames(self, error: RequestError) -> bytes:
        return self._answer.failure(error)

    async def last_frames(self, error: RequestError | None) -> bytes:
        frames = b"" if error is None else self.error_frames(error)
        try:
            await self._keep()
        except RequestError as problem:
            # Report only the first error.
            frames = frames or self.error_frames(problem)
        return frames or self._answer.last_frames()
