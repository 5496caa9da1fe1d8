"""The body of a message request, and its way to the body of a chat completion.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import InvalidParameter
from octavo.sampling_params import MAX_TOKEN_ID
from octavo.server.anthropic.blocks import chat_messages, system_text
from octavo.server.body import BodyReader
from octavo.server.errors import UnsupportedParameter
from octavo.server.front import Front
from octavo.server.openai.chat import ChatBody, refused_elsewhere

REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": (),
    "output_config": (),
    "output_format": (),
    "speed": ("standard",),
}
ACCEPTED = frozenset({"service_tier", "cache_control", "anthropic_version", "anthropic_beta"})
"""Where a request is computed, and hints on caching, which is automatic here."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Counted(msgspec.Struct, kw_only=True):
    """A conversation whose tokens are to be counted."""

    model: str = ""
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessageBody(Counted, kw_only=True):
    """A request for the next message of a conversation."""

    max_tokens: int
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] = {}
    timeout: float | None = None


counted_reader = BodyReader(Counted, REFUSED, ACCEPTED)
message_reader = BodyReader(MessageBody, refused_elsewhere(MessageBody, ACCEPTED) | REFUSED, ACCEPTED)


def chat_body(body: Counted, front: Front) -> ChatBody:
    """The same conversation as a chat completion's. Raises ``InvalidParameter``."""
    system = system_text(body.system)
    messages = [{"role": "system", "content": system}] if system else []
    messages += chat_messages(body.messages)
    # A last message of the assistant is the beginning of the reply.
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
        chat_template_kwargs=_thinking(body.thinking, front),
    )


def message_chat_body(body: MessageBody, front: Front) -> ChatBody:
    """The same request as a chat completion's. Raises ``InvalidParameter``."""
    if not 1 <= body.max_tokens <= MAX_TOKEN_ID:
        raise InvalidParameter("max_tokens", f"'max_tokens' must be a whole number from 1 to {MAX_TOKEN_ID}.")
    user = body.metadata.get("user_id")
    if not isinstance(user, str | None):
        raise InvalidParameter("metadata", "'metadata.user_id' must be a string.")
    return msgspec.structs.replace(
        chat_body(body, front),
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
    """Whether the client asked to see the reasoning."""
    return body.thinking is not None and body.thinking.get("type") != "disabled"


def _thinking(thinking: dict[str, Any] | None, front: Front) -> dict[str, Any]:
    """The variables of the template for what a client says of reasoning. Raises ``RequestError``."""
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidParameter("thinking", "'thinking.type' must be 'enabled', 'adaptive' or 'disabled'.")
    can_think = front.message_format.thinks or front.message_format.is_harmony
    if kind != "disabled" and not can_think:
        raise UnsupportedParameter("thinking", "'thinking' is not supported: this model writes no reasoning.")
    if "enable_thinking" in (front.chat_template.source or ""):
        return {"enable_thinking": kind != "disabled"}
    return {}


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
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """The choice in the words of chat completions, and whether there may be several calls."""
    if choice is None:
        return None, True
    kind, is_single = choice.get("type"), choice.get("disable_parallel_tool_use", False)
    if not isinstance(is_single, bool):
        raise InvalidParameter("tool_choice", "'tool_choice.disable_parallel_tool_use' must be true or false.")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, not is_single
    if not isinstance(kind, str) or kind not in CHOICES:
        raise InvalidParameter("tool_choice", "'tool_choice.type' must be 'auto', 'any', 'tool' or 'none'.")
    return CHOICES[kind], not is_single
