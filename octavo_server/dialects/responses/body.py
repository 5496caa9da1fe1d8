"""The body of a response request, and its conversion to a chat completion body."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import InvalidParameter
from octavo_server.dialects.chat_reply import FieldNames, Translated
from octavo_server.dialects.history import LeftOut
from octavo_server.dialects.openai.chat_body import IGNORED_IN_CHAT, ChatBody, effort, refused_elsewhere
from octavo_server.dialects.openai.common_fields import SAMPLING, RepetitionDetectionFields, check_max_tokens, sampling
from octavo_server.dialects.responses.items import ItemMessages
from octavo_server.dialects.responses.tools import Item, chat_choice, offered_tools
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.services import ModelServices

PATH = "/v1/responses"

REFUSED: dict[str, tuple[Any, ...]] = {
    "previous_input_messages": (),
    "prompt": (),
}
"""Parts of the conversation that would be missing."""
IGNORED: dict[str, tuple[Any, ...]] = IGNORED_IN_CHAT | {
    "context_management": (),
    "enable_response_messages": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
}
"""No tools run on this server, and a conversation that does not fit is rejected, never shortened."""
ACCEPTED = frozenset({"client_metadata", "request_id"})
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Values of ``include`` that are honoured; reasoning is returned unencrypted. Others ask about tools of a server."""
SAME = (
    *("model", "parallel_tool_calls", "stream", "prompt_cache_key", "prompt_cache_retention", "session_id", "user"),
    *("timeout", "priority", "cache_salt", "return_token_ids", "stop", "stop_token_ids", "bad_words", "logit_bias"),
    *("allowed_token_ids", "skip_special_tokens", "repetition_detection", "structured_outputs", "chat_template_kwargs"),
)
"""Fields that chat completions have as well, of which OpenAI's responses have the first line; others are vLLM's."""
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
}
"""Fields of chat completions, and what they are called here."""
TOOL_MEMBERS = {
    f".{kind}{path}": path
    for kind in ("function", "custom")
    for path in ("", ".name", ".description", ".parameters", ".strict", ".format")
}


class Reasoning(msgspec.Struct, kw_only=True, frozen=True):
    """Options for reasoning."""

    effort: str | None = None
    max_tokens: int | None = None
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
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    timeout: float | None = None
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False
    sampling: dict[str, Any] = {}
    """Options that are given, besides ``temperature`` and ``top_p``."""
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] = {}
    skip_special_tokens: bool = True
    repetition_detection: RepetitionDetectionFields | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named


OPTIONS = {name: option for name, option in SAMPLING.items() if name not in ("temperature", "top_p")}
decoder = BodyDecoder(
    ResponseBody, refused_elsewhere(ResponseBody, ACCEPTED | set(OPTIONS)) | REFUSED, ACCEPTED, IGNORED, OPTIONS
)


def without_effect(body: ResponseBody, services: ModelServices) -> list[str]:
    """Fields that are ignored in this request."""
    named = [] if effort(body.reasoning.effort, services) is not None else ["reasoning.effort"]
    if not services.message_format.can_reason:
        named += ["reasoning.max_tokens"] if body.reasoning.max_tokens is not None else []
        named += ["thinking_token_budget"] if "thinking_token_budget" in body.sampling else []
    named += [f"include.{name}" for name in body.include if name not in INCLUDED]
    if body.top_logprobs and LOGPROBS not in body.include:
        named.append("top_logprobs")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        named.append("stream_options.include_obfuscation")
    return named if body.text.verbosity in (None, "medium") else [*named, "text.verbosity"]


def check(body: ResponseBody) -> None:
    """Validate what chat completions do not. Raises ``RequestError``."""
    check_max_tokens("max_output_tokens", body.max_output_tokens)
    if LOGPROBS in body.include and body.background:
        raise UnsupportedParameter("include", f"'{LOGPROBS}' is not supported with 'background'.")
    if body.background and not body.store:
        raise InvalidParameter("background", "'background' needs 'store': the answer is fetched by its id.")
    if body.conversation is not None and body.previous_response_id is not None:
        raise InvalidParameter("conversation", "'conversation' and 'previous_response_id' exclude each other.")
    check_metadata(body.metadata)


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise ``InvalidParameter`` for more pairs than the API allows."""
    if len(metadata) > 16:
        raise InvalidParameter("metadata", "'metadata' takes at most 16 pairs.")


def translated(body: ResponseBody, history: list[Item], num_earlier: int = 0, takes_images: bool = False) -> Translated:
    """Convert the request to a chat completion. Raises ``InvalidParameter``.

    ``history`` are all items of the conversation, of which ``num_earlier`` come from the store.
    """
    left_out = LeftOut()
    items = ItemMessages(history, left_out, num_earlier=num_earlier, takes_images=takes_images)
    messages, places = items.messages, items.places
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
        places = ["instructions", *places]
    tools = offered_tools(body.tools, left_out)
    chat = ChatBody(
        messages=messages,
        max_tokens=body.max_output_tokens,
        sampling=body.sampling
        | sampling(temperature=body.temperature, top_p=body.top_p, thinking_token_budget=body.reasoning.max_tokens),
        tools=[tool.for_chat() for tool in tools],
        tool_choice=chat_choice(body.tool_choice, tools, len(body.tools)),
        response_format=_format(body.text.format),
        reasoning_effort=body.reasoning.effort,
        logprobs=LOGPROBS in body.include,
        top_logprobs=body.top_logprobs if LOGPROBS in body.include else None,
        **{name: getattr(body, name) for name in SAME},
    )
    list_places = {"messages": places, "tools": [tool.place for tool in tools]}
    names = {name: own for name, own in NAMES.items() if name not in body.sampling}
    return Translated(chat, FieldNames(names, list_places, TOOL_MEMBERS), left_out.names)


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as a chat completion ``response_format``, which nests the schema in an object."""
    if given is not None and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
    return given
