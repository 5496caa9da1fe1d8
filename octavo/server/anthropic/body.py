"""The body of a message request, and its conversion to a chat completion body.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import InvalidParameter
from octavo.sampling_params import MAX_TOKEN_ID
from octavo.server.anthropic.blocks import chat_messages, system_text
from octavo.server.body_decoder import BodyDecoder
from octavo.server.errors import UnsupportedParameter
from octavo.server.openai.chat import IGNORED_IN_CHAT, ChatBody, effort, refused_elsewhere
from octavo.server.services import Services

REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": (),
    "speed": ("standard",),
}
ACCEPTED = frozenset({"service_tier", "cache_control", "anthropic_version", "anthropic_beta"})
"""Where a request is computed, and caching hints, which are ignored because caching is automatic."""
CONFIG_KEYS = ("effort", "format")
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


class MessageBody(Counted, kw_only=True):
    """The body of a message request."""

    max_tokens: int
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] = {}
    timeout: float | None = None


counted_decoder = BodyDecoder(Counted, REFUSED, ACCEPTED)
message_decoder = BodyDecoder(
    MessageBody, refused_elsewhere(MessageBody, ACCEPTED) | REFUSED, ACCEPTED, IGNORED_IN_CHAT
)


def without_effect(body: Counted, services: Services) -> list[str]:
    """Fields that are ignored in this request."""
    named = [f"output_config.{name}" for name in body.output_config if name not in CONFIG_KEYS]
    if effort(_effort(body), services) is None:
        named.append("output_config.effort")
    return [*named, "thinking"] if wants_thinking(body) and not services.message_format.can_reason else named


def chat_body(body: Counted, services: Services) -> ChatBody:
    """Convert the conversation to a chat completion body. Raises ``InvalidParameter``."""
    system = system_text(body.system)
    messages = [{"role": "system", "content": system}] if system else []
    messages += chat_messages(body.messages)
    # A final assistant message is the beginning of the reply (prefill).
    is_begun = messages[-1]["role"] == "assistant"
    choice, is_parallel = _tool_choice(body.tool_choice)
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools)],
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        chat_template_kwargs=_thinking(body.thinking, services),
        response_format=_response_format(body),
        reasoning_effort=_effort(body),
    )


def message_chat_body(body: MessageBody, services: Services) -> ChatBody:
    """Convert the request to a chat completion body. Raises ``InvalidParameter``."""
    if not 1 <= body.max_tokens <= MAX_TOKEN_ID:
        raise InvalidParameter("max_tokens", f"'max_tokens' must be a whole number from 1 to {MAX_TOKEN_ID}.")
    user = body.metadata.get("user_id")
    if not isinstance(user, str | None):
        raise InvalidParameter("metadata", "'metadata.user_id' must be a string.")
    return msgspec.structs.replace(
        chat_body(body, services),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        user=user,
        timeout=body.timeout,
    )


def wants_thinking(body: Counted) -> bool:
    """Whether the response includes reasoning."""
    return body.thinking is not None and body.thinking.get("type") != "disabled"


def _thinking(thinking: dict[str, Any] | None, services: Services) -> dict[str, Any]:
    """Template variables for the ``thinking`` field. Raises ``InvalidParameter``."""
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidParameter("thinking", "'thinking.type' must be 'enabled', 'adaptive' or 'disabled'.")
    if "enable_thinking" in (services.chat_template.source or ""):
        return {"enable_thinking": kind != "disabled"}
    return {}


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


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind not in ("custom", None):
        message = f"'{where}.type' is '{str(kind)[:40]}'; only tools that the client runs are supported."
        raise UnsupportedParameter("tools", message)
    if "input_schema" not in tool:
        raise InvalidParameter("tools", f"'{where}' must have an 'input_schema'.")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """``tool_choice`` as in chat completions, and ``parallel_tool_calls``, ``None`` if not given."""
    if choice is None:
        return None, None
    kind, is_single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        raise InvalidParameter("tool_choice", "'tool_choice.disable_parallel_tool_use' must be true or false.")
    is_parallel = None if is_single is None else not is_single
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, is_parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise InvalidParameter("tool_choice", "'tool_choice.type' must be 'auto', 'any', 'tool' or 'none'.")
    return CHOICES[kind], is_parallel
