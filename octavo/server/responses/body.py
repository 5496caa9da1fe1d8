"""The body of a response request, and its conversion to a chat completion body."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import InvalidParameter
from octavo.sampling_params import MAX_LOGPROBS
from octavo.server.body_decoder import BodyDecoder
from octavo.server.errors import UnsupportedParameter, printable
from octavo.server.openai.chat import IGNORED_IN_CHAT, ChatBody, effort, refused_elsewhere
from octavo.server.openai.fields import check_max_tokens
from octavo.server.responses.items import Item, chat_messages
from octavo.server.services import Services

PATH = "/v1/responses"

REFUSED: dict[str, tuple[Any, ...]] = {
    "context_management": (),
    "enable_response_messages": (),
    "previous_input_messages": (),
    "prompt": (),
}
IGNORED: dict[str, tuple[Any, ...]] = IGNORED_IN_CHAT | {"max_tool_calls": (), "truncation": ("disabled",)}
"""No tools run on this server, and a conversation that does not fit is rejected, never truncated."""
ACCEPTED = frozenset({"prompt_cache_retention", "client_metadata", "request_id", "session_id"})
INCLUDED = ("reasoning.encrypted_content",)
"""Accepted values of ``include``; without effect, as reasoning is returned unencrypted."""


class Reasoning(msgspec.Struct, kw_only=True, frozen=True):
    """Options for reasoning."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options for the output text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ConversationName(msgspec.Struct, kw_only=True, frozen=True):
    """The conversation of a response."""

    id: str


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options for streams."""

    include_obfuscation: bool | None = None


class ResponseBody(msgspec.Struct, kw_only=True):
    """The body of a response request."""

    model: str = ""
    input: str | list[Item] = []
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    include: list[str] = []
    top_logprobs: int = 0
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    timeout: float | None = None
    priority: int = 0
    cache_salt: str = ""

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named


decoder = BodyDecoder(ResponseBody, refused_elsewhere(ResponseBody, ACCEPTED) | REFUSED, ACCEPTED, IGNORED)


def without_effect(body: ResponseBody, services: Services) -> list[str]:
    """Fields that are ignored in this request."""
    named = [] if effort(body.reasoning.effort, services) is not None else ["reasoning.effort"]
    return named if body.text.verbosity in (None, "medium") else [*named, "text.verbosity"]


def check(body: ResponseBody) -> None:
    """Validate what chat completions do not. Raises ``RequestError``."""
    check_max_tokens("max_output_tokens", body.max_output_tokens)
    for name in body.include:
        if name not in INCLUDED:
            raise UnsupportedParameter("include", f"'include' of '{printable(name)}' is not supported.")
    if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidParameter("top_logprobs", f"'top_logprobs' must be from 0 to {MAX_LOGPROBS}.")
    if body.top_logprobs:
        raise UnsupportedParameter("top_logprobs", "'top_logprobs' is not supported here; chat completions have it.")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise UnsupportedParameter("stream_options", "'stream_options.include_obfuscation' is not supported.")
    if body.background and not body.store:
        raise InvalidParameter("background", "'background' needs 'store': the answer is fetched by its id.")
    if body.conversation is not None and body.previous_response_id is not None:
        raise InvalidParameter("conversation", "'conversation' and 'previous_response_id' exclude each other.")
    check_metadata(body.metadata)


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise ``InvalidParameter`` for more pairs than the API allows."""
    if len(metadata) > 16:
        raise InvalidParameter("metadata", "'metadata' takes at most 16 pairs.")


def chat_body(body: ResponseBody, history: list[Item]) -> ChatBody:
    """Convert the request, preceded by ``history``, to a chat completion body. Raises ``InvalidParameter``."""
    messages = chat_messages(history)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return ChatBody(
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format),
        reasoning_effort=body.reasoning.effort,
        stream=body.stream,
        prompt_cache_key=body.prompt_cache_key,
        user=body.user,
        timeout=body.timeout,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = printable(str(tool.get("type")))
        raise UnsupportedParameter("tools", f"'{where}.type' is '{kind}'; only 'function' is supported.")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as a chat completion ``response_format``, which nests the schema in an object."""
    if given is not None and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
    return given
