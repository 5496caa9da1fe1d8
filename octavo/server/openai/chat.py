"""POST /v1/chat/completions: a conversation in, the assistant's next message out.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.sampling_params import MAX_LOGPROBS, MAX_TOKEN_ID
from octavo.server.admission import Asked
from octavo.server.body import BodyReader
from octavo.server.errors import UnsupportedParameter
from octavo.server.front import Front, front_of
from octavo.server.generation import Choice, News
from octavo.server.openai.fields import (
    ACCEPTED,
    REFUSED,
    GenerationFields,
    check_generation_fields,
    sampling_params,
)
from octavo.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from octavo.server.openai.messages import Conversation, TemplateOptions
from octavo.server.openai.rendering import ChunkFrame, Identity, encode, encode_line, json_response, usage
from octavo.server.openai.schema import Endpoint
from octavo.server.sse import EventStream, whole

REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = REFUSED | {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": (),
    "echo": (),
    "function_call": ("none",),
    "functions": (),
    "include_reasoning": (True,),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning": (),
    "reasoning_effort": ("none",),
    "suffix": (),
    "tool_choice": ("none",),
    "tools": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
ACCEPTED_IN_CHAT = ACCEPTED | {"parallel_tool_calls"}

_OPENS = b'"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
_GOES_ON = b'},"logprobs":null,"finish_reason":null'
_ENDS = b'"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b'


class ChatBody(GenerationFields, kw_only=True):
    """A request for the next message of a conversation."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False


reader = BodyReader(ChatBody, REFUSED_IN_CHAT, ACCEPTED_IN_CHAT)


async def create_chat_completion(request: Request) -> Response:
    front = front_of(request)
    front.admission.check_room()
    body, headers = await front.read(request, reader)
    generation = await front.admission.admit(_asked(body, front, request))
    answer = ChatAnswer(front, body, generation.choices)
    if body.stream:
        return EventStream(generation, answer, headers)
    choices = await whole(generation, request)
    if not body.logprobs and body.prompt_logprobs is None:
        return json_response(answer.whole(choices), headers)
    # Log-probabilities of long texts are megabytes of JSON.
    return await asyncio.to_thread(lambda: json_response(answer.whole(choices), headers))


ENDPOINTS = [Endpoint("POST", "/v1/chat/completions", create_chat_completion, "Answer a conversation", ChatBody)]


def conversation(messages: list[dict[str, Any]], options: TemplateOptions, front: Front) -> Conversation:
    """The conversation in a body. Raises ``InvalidParameter``, also when the model cannot take any."""
    front.need_tokenizer("messages")
    return Conversation(messages, options, front.chat_template)


def _asked(body: ChatBody, front: Front, request: Request) -> Asked:
    check_generation_fields(body, front)
    if body.prompt_logprobs is not None and body.stream:
        raise UnsupportedParameter("prompt_logprobs", "'prompt_logprobs' is not supported with 'stream'.")
    return Asked(
        prompts=[conversation(body.messages, body, front).prompt],
        prompt_field="messages",
        params=sampling_params(body, _max_tokens(body), _logprobs(body), body.prompt_logprobs),
        default_max_tokens=None,
        add_special_tokens=body.add_special_tokens,
        priority=body.priority,
        cache_salt=body.cache_salt,
        tenant=front.tenant(request, body.user),
        ttft_target=body.ttft_target or 0.0,
    )


def _max_tokens(body: ChatBody) -> int | None:
    """The newer name of the limit wins."""
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        if value is not None and not 1 <= value <= MAX_TOKEN_ID:
            raise InvalidParameter(name, f"'{name}' must be a whole number from 1 to {MAX_TOKEN_ID}.")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidParameter("top_logprobs", f"'top_logprobs' must be from 0 to {MAX_LOGPROBS}.")
    if top and not body.logprobs:
        raise InvalidParameter("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return top if body.logprobs else None


class ChatAnswer:
    """Renders the choices of one request, whole or as chunks."""

    def __init__(self, front: Front, body: ChatBody, choices: list[Choice]) -> None:
        self.body = body
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.identity = Identity("chatcmpl", kind, front.model_name)
        self._names = TokenNames(front.tokenizer, body.return_tokens_as_token_ids)
        self._has_details = body.logprobs or body.return_token_ids
        self._frame = ChunkFrame(self.identity, choices, body.includes_usage, body.has_continuous_usage)
        self._starts = [self._frame.start + b'"index":%d,"delta":{"content":' % choice.index for choice in choices]
        self._unopened = set(range(len(choices)))

    # --- not streamed ---

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        result = {
            **self.identity.as_dict(),
            "choices": [self._whole_choice(choice) for choice in choices],
            "usage": usage(choices),
        }
        if self.body.prompt_logprobs is not None:
            entries = choices[0].prompt_logprobs
            result["prompt_logprobs"] = prompt_logprobs(entries, self._names, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            result["prompt_token_ids"] = choices[0].prompt.tokens
        return result

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        news = choice.take()
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": news.text, "refusal": None},
            **self._details(news),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _details(self, news: News) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            details["logprobs"] = chat_logprobs(news.logprobs, self._names, self.body.top_logprobs or 0)
        if self.body.return_token_ids:
            details["token_ids"] = news.tokens
        return details

    # --- streamed ---

    def frames(self, choice: Choice) -> bytes:
        """The chunks for what is new about a choice: its role at first, its reason to finish at the end."""
        news = choice.take()
        data = b""
        if choice.index in self._unopened:
            self._unopened.discard(choice.index)
            data = self._frame.start + _OPENS % choice.index + self._prompt_ids(choice) + self._frame.end()
        if self._has_details and news.tokens:
            details = {"index": choice.index, "delta": {"content": news.text}, **self._details(news)}
            details["finish_reason"] = None
            data += self._frame.start + encode_line(details)[1:-1] + self._frame.end()
        elif news.text:
            data += self._starts[choice.index] + encode_line(news.text) + _GOES_ON + self._frame.end()
        if choice.finish_reason is not None:
            end = _ENDS % (choice.index, encode(choice.finish_reason), encode_line(choice.stop_reason))
            data += self._frame.start + end + self._frame.end()
        return data

    def _prompt_ids(self, choice: Choice) -> bytes:
        return b',"prompt_token_ids":' + encode(choice.prompt.tokens) if self.body.return_token_ids else b""

    def last_frames(self) -> bytes:
        return self._frame.usage_chunk()
