"""The body of a message request, and its conversion to a chat completion body.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from octavo.errors import InvalidParameter
from octavo.sampling_params import MAX_TOKEN_ID
from octavo.text.reasoning_effort import SWITCHES, thinking_switch
from octavo_server.dialects.anthropic.content_blocks import chat_messages, system_text
from octavo_server.dialects.chat_reply import FieldNames, Translated
from octavo_server.dialects.history import LeftOut
from octavo_server.dialects.openai.chat_body import IGNORED_IN_CHAT, ChatBody, effort, refused_elsewhere
from octavo_server.dialects.openai.common_fields import sampling
from octavo_server.http.error_responses import UnsupportedParameter, printable
from octavo_server.http.request_body import BodyDecoder
from octavo_server.services import ModelServices

ACCEPTED = frozenset({"service_tier", "cache_control", "anthropic_version", "anthropic_beta", "betas"})
"""Where a request is computed, and a caching hint that says nothing to a count of tokens."""
LONGER = "1h"
"""Value of ``cache_control.ttl``; with any other, prompts are kept for five minutes."""
IGNORED: dict[str, tuple[Any, ...]] = IGNORED_IN_CHAT | {
    "container": (),
    "inference_geo": (),
    "mcp_servers": (),
    "speed": ("standard",),
}
"""Where and with which tools of its own a server answers; this one runs no tools."""
CONFIG_KEYS = ("effort", "format")
TOOL_MEMBERS = {
    ".function": "",
    ".function.name": ".name",
    ".function.description": ".description",
    ".function.parameters": ".input_schema",
    ".function.strict": ".strict",
}
"""Paths in a tool of chat completions, and what they are called here."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Counted(msgspec.Struct, kw_only=True):
    """The body of a token count request."""

    model: str = ""
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] = {}
    output_format: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """vLLM's, as ``cache_salt`` of a message is."""


class MessageBody(Counted, kw_only=True):
    """The body of a message request."""

    max_tokens: int
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] = {}
    cache_control: Any = None
    cache_salt: str = ""
    timeout: float | None = None
    return_token_ids: bool = False


counted_decoder = BodyDecoder(Counted, {}, ACCEPTED, IGNORED)
message_decoder = BodyDecoder(MessageBody, refused_elsewhere(MessageBody, ACCEPTED), ACCEPTED, IGNORED)


def without_effect(body: Counted, services: ModelServices) -> list[str]:
    """Fields that are ignored in this request."""
    named = [f"output_config.{name}" for name in body.output_config if name not in CONFIG_KEYS]
    if effort(_effort(body), services) is None:
        named.append("output_config.effort")
    named += [f"context_management.edits.{kind}" for kind in _edits(body.context_management or {})]
    return [*named, "thinking"] if wants_thinking(body) and not services.message_format.can_reason else named


def _edits(given: dict[str, Any]) -> Iterator[str]:
    """The kinds of edits of earlier turns that would change the conversation. None is made: the model reads all of
    it."""
    edits = given.get("edits")
    for edit in edits if isinstance(edits, list) else []:
        if isinstance(edit, dict) and edit.get("keep") != "all":
            yield str(edit.get("type"))


def translated(body: Counted, services: ModelServices) -> Translated:
    """Convert the conversation to a chat completion. Raises ``InvalidParameter``."""
    left_out = LeftOut()
    system = system_text(body.system)
    messages, places = chat_messages(body.messages, left_out, services.takes_images)
    if system:
        messages, places = [{"role": "system", "content": system}, *messages], ["system", *places]
    # A final assistant message is the beginning of the reply (prefill).
    is_begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    tools = offered_tools(body, left_out)
    choice, is_parallel = _tool_choice(body.tool_choice, tools)
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=list(tools.functions.values()),
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        chat_template_kwargs=_thinking(body.thinking, services) | body.chat_template_kwargs,
        response_format=_response_format(body),
        reasoning_effort=_effort(body),
        sampling=sampling(thinking_token_budget=_budget(body.thinking)),
    )
    names = {
        "stop": "stop_sequences",
        "user": "metadata.user_id",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": "output_config.format" if body.output_config.get("format") else "output_format",
    }
    list_places = {"messages": places, "tools": list(tools.functions)}
    return Translated(chat, FieldNames(names, list_places, TOOL_MEMBERS), left_out.names)


def translated_message(body: MessageBody, services: ModelServices) -> Translated:
    """Convert the request to a chat completion. Raises ``InvalidParameter``."""
    if not 1 <= body.max_tokens <= MAX_TOKEN_ID:
        raise InvalidParameter("max_tokens", f"'max_tokens' must be a whole number from 1 to {MAX_TOKEN_ID}.")
    user = body.metadata.get("user_id")
    if not isinstance(user, str | None):
        raise InvalidParameter("metadata", "'metadata.user_id' must be a string.")
    conversation = translated(body, services)
    chat = msgspec.structs.replace(
        conversation.chat,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        prompt_cache_retention=_retention(body),
        sampling=conversation.chat.sampling
        | sampling(temperature=body.temperature, top_k=body.top_k, top_p=body.top_p),
        user=user,
        cache_salt=body.cache_salt,
        timeout=body.timeout,
        return_token_ids=body.return_token_ids,
    )
    return conversation._replace(chat=chat)


def _retention(body: MessageBody) -> str | None:
    """For how long the marks for the cache ask to keep the prompt: all of it, as it is one path of the cache."""
    parts = [body.system, body.tools, *(message.get("content") for message in body.messages)]
    blocks = [block for part in parts if isinstance(part, list) for block in part if isinstance(block, dict)]
    marks = [mark for mark in (body.cache_control, *(block.get("cache_control") for block in blocks)) if mark]
    is_longer = any(isinstance(mark, dict) and mark.get("ttl") == LONGER for mark in marks)
    return LONGER if is_longer else "5m" if marks else None


def wants_thinking(body: Counted) -> bool:
    """Whether the response includes reasoning."""
    if body.thinking is None:
        return any(body.chat_template_kwargs.get(name) is True for name in SWITCHES)
    return bool(body.thinking.get("type") != "disabled")


def _thinking(thinking: dict[str, Any] | None, services: ModelServices) -> dict[str, Any]:
    """Template variables for the ``thinking`` field. Raises ``InvalidParameter``."""
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidParameter("thinking", "'thinking.type' must be 'enabled', 'adaptive' or 'disabled'.")
    return thinking_switch(kind != "disabled", services.chat_template.source or "")


def _budget(thinking: dict[str, Any] | None) -> int | None:
    """Most tokens of reasoning. Raises ``InvalidParameter``."""
    budget = (thinking or {}).get("budget_tokens")
    if not isinstance(budget, int | None) or isinstance(budget, bool):
        raise InvalidParameter("thinking", "'thinking.budget_tokens' must be a whole number.")
    return budget


def _effort(body: Counted) -> str | None:
    requested = body.output_config.get("effort")
    if not isinstance(requested, str | None):
        raise InvalidParameter("output_config", "'output_config.effort' must be a string.")
    return requested


def _response_format(body: Counted) -> dict[str, Any] | None:
    """``output_config.format`` or the older ``output_format`` as a chat completion ``response_format``."""
    given, where = body.output_config.get("format"), "output_config.format"
    if given is None:
        given, where = body.output_format, "output_format"
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        message = f"'{where}' must have 'json_schema' as its 'type', and a JSON schema, an object, as its 'schema'."
        raise InvalidParameter(where.partition(".")[0], message)
    return {"type": "json_schema", "json_schema": {"name": "output", "strict": True, "schema": given["schema"]}}


class OfferedTools(NamedTuple):
    """The tools of a request."""

    functions: dict[str, dict[str, Any]]
    """Those that the client runs, as functions of a chat completion, by their place in the request."""
    skipped: dict[str, str]
    """Types of those that a server would have to run, or that only other models know, by name."""


def offered_tools(body: Counted, left_out: LeftOut) -> OfferedTools:
    """Raises ``InvalidParameter``."""
    tools = OfferedTools({}, {})
    for place, tool in enumerate(body.tools):
        kind = tool.get("type")
        if kind in ("custom", None):
            tools.functions[f"tools[{place}]"] = _function(tool, f"tools[{place}]")
        else:
            left_out.add("tools", kind)
            tools.skipped[str(tool.get("name"))] = printable(str(kind))
    return tools


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise InvalidParameter("tools", f"'{where}' must have an 'input_schema'.")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None, tools: OfferedTools) -> tuple[str | dict[str, Any] | None, bool | None]:
    """``tool_choice`` as in chat completions, and ``parallel_tool_calls``, ``None`` if not given."""
    if choice is None:
        return None, None
    kind, is_single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        raise InvalidParameter("tool_choice", "'tool_choice.disable_parallel_tool_use' must be true or false.")
    is_parallel = None if is_single is None else not is_single
    if kind == "tool":
        name = choice.get("name")
        if isinstance(name, str) and name in tools.skipped:
            message = f"'tool_choice' names a tool of type '{tools.skipped[name]}', which cannot be used here."
            raise UnsupportedParameter("tool_choice", message)
        return {"type": "function", "function": {"name": name}}, is_parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise InvalidParameter("tool_choice", "'tool_choice.type' must be 'auto', 'any', 'tool' or 'none'.")
    if kind == "any" and tools.skipped and not tools.functions:
        kind = next(iter(tools.skipped.values()))
        message = f"'tool_choice' asks for a call, but a tool of type '{kind}' cannot be used here."
        raise UnsupportedParameter("tool_choice", message)
    return CHOICES[kind], is_parallel
