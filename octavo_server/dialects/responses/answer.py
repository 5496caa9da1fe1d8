"""The answer to a response request, unstreamed or as events.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from octavo.errors import RequestError
from octavo.types import TokenLogprobs
from octavo_server.dialects.chat_reply import ChatReply
from octavo_server.dialects.openai.answer_parts import TokenNames, chat_logprobs
from octavo_server.dialects.responses.body import ResponseBody
from octavo_server.dialects.responses.events import ResponseEvents
from octavo_server.dialects.responses.stored_responses import Record
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http.response import EventStream
from octavo_server.services import ModelServices


def begun(body: ResponseBody, model: str, sampling_defaults: Mapping[str, float], is_parallel: bool) -> dict[str, Any]:
    """The response object at the start; it echoes the request's fields, with the defaults that were chosen for absent
    ones."""
    chosen = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    chosen |= {**sampling_defaults, **body.sampling}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
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
        "tools": [
            {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool
            for tool in body.tools
        ],
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
    for item in response["output"]:
        if item["status"] == "in_progress":
            item["status"] = "incomplete"


def ended(response: dict[str, Any], choice: GeneratedChoice) -> None:
    """Complete the response object of a finished choice."""
    is_cut, num_prompt = choice.finish_reason == "length", len(choice.prompt.tokens)
    response["status"] = end_status(choice)
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
    response |= choice.ids


def end_status(choice: GeneratedChoice) -> str:
    """Status of the response, and of its last item, at the end of ``choice``."""
    return "incomplete" if choice.finish_reason == "length" else "completed"


class TextLogprobs:
    """Log-probabilities of the tokens that texts were made of, without those of calls and of marks around them."""

    def __init__(self, services: ModelServices, skips_special_tokens: bool, num_top: int) -> None:
        self._names = TokenNames(services.tokenizer, as_ids=False)
        self._num_top = num_top
        self._hidden = frozenset[int]()
        """Special tokens that the text omits."""
        if services.tokenizer is not None and skips_special_tokens:
            self._hidden = services.tokenizer.special_token_ids - services.message_format.shown_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end = 0
        """Of the last token, in characters of the complete text."""
        self._tokens: deque[tuple[int, int, TokenLogprobs]] = deque()
        """Where tokens that no text was made of yet begin and end."""
        self._places: deque[tuple[int, int]] = deque()
        """Where texts begin and end that were not taken yet."""

    def add(self, tokens: Iterable[TokenLogprobs], places: Iterable[tuple[int, int]]) -> None:
        """The tokens that came since, and the places in the complete text of the pieces that will be taken."""
        for entry in tokens:
            data = b"" if entry.token_id in self._hidden else self._names.bytes(entry.token_id)
            if data:
                start, self._end = self._end, self._end + len(self._decoder.decode(data))
                # A token that ends inside a character has a part in it.
                self._tokens.append((start, self._end + bool(self._decoder.getstate()[0]), entry))
        self._places += places

    def take(self, length: int) -> list[dict[str, Any]]:
        """Those of the next text, of ``length`` characters. A token with parts in two texts counts for the first."""
        found = []
        while length:
            start, end = self._places.popleft()
            if end - start > length:
                self._places.appendleft((start + length, end))
                end = start + length
            length -= end - start
            while self._tokens and self._tokens[0][0] < end:
                _, token_end, entry = self._tokens.popleft()
                if token_end > start:
                    found.append(entry)
        shown: list[dict[str, Any]] = chat_logprobs(found, self._names, self._num_top)["content"]
        return shown


class ResponseAnswer:
    """Renders one reply as a response object and as events."""

    def __init__(self, record: Record, logprobs: TextLogprobs | None, reply: ChatReply) -> None:
        """``logprobs`` are there if they are asked for: such a stream cannot be read again."""
        self.response, self.id = record.response, record.id
        self._logprobs = logprobs
        self._reply = reply
        if logprobs is None:
            self._events = ResponseEvents(record.response)
            record.deltas = self._events.deltas
        else:
            self._events = ResponseEvents(record.response, take_logprobs=logprobs.take)
            record.deltas = None

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        """The final response object, once the choice is finished."""
        self.frames(self._reply.choice)
        return self.response

    def frames(self, choice: GeneratedChoice) -> bytes:
        """The events for new output."""
        pieces = self._reply.pieces()
        if self._logprobs is not None:
            self._logprobs.add(self._reply.logprobs, self._reply.places)
            self._reply.logprobs.clear()
        data = self._events.frames(pieces)
        if choice.finish_reason is not None:
            data += self._events.close(end_status(choice))
            ended(self.response, choice)
        return data

    def last_frames(self) -> bytes:
        """The final event, once the choice is finished."""
        return self._events.last(self.response)

    def failure(self, error: RequestError) -> bytes:
        """The event that reports an error."""
        failed(self.response, error)
        return self._events.last(self.response)


class ResponseStream(EventStream):
    """Named events without a final ``[DONE]``."""

    END = b""

    def __init__(
        self,
        generation: Generation,
        answer: ResponseAnswer,
        headers: Mapping[str, str],
        keep: Callable[[], Awaitable[None]],
    ) -> None:
        """``keep`` stores the response before the final event is sent, which reports a failure if ``keep`` raises
        ``RequestError``."""
        super().__init__(generation, answer, headers)
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
