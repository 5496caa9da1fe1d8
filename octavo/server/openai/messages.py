"""Conversion of a conversation to a prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.errors import InvalidParameter
from octavo.server.errors import UnsupportedParameter
from octavo.text.chat_messages import normalise_messages
from octavo.text.chat_template import ChatTemplate
from octavo.text.tools_in_text import WriteCalls, with_tools_in_text

ROLES = ("system", "developer", "user", "assistant", "tool")
REFUSED_KEYS = ("function_call", "audio")
REASONING_KEYS = ("reasoning_content", "reasoning")


class TemplateOptions(Protocol):
    """The fields of a body with options for the chat template."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages and how to render them as a prompt. Raises ``InvalidParameter`` for unsupported messages."""

    messages: list[dict[str, Any]]
    options: TemplateOptions
    template: ChatTemplate
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Template variables set by fields of the body."""
    write_calls: WriteCalls | None = None
    """Format of tool calls as text, for a template without tool support."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise InvalidParameter("messages", "'messages' must not be empty.")
        checked = [_checked(message, f"messages[{place}]") for place, message in enumerate(self.messages)]
        object.__setattr__(self, "messages", checked)
        if self.options.continue_final_message and self.options.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message",
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            )

    def prompt(self) -> str:
        """Render the prompt. Runs the template, so call it in a thread. Raises ``InvalidParameter``."""
        messages = normalise_messages(self.messages)
        if self.write_calls is None:
            return self._rendered(messages, self.tools)
        tools = self.tools or []
        updated = with_tools_in_text(messages, tools, self.write_calls)
        try:
            return self._rendered(updated, None)
        except InvalidParameter:
            if not tools or any(message["role"] == "system" for message in messages):
                raise
            # The template may reject only the added system message.
            return self._rendered(with_tools_in_text(messages, tools, self.write_calls, has_system=False), None)

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        text = self.template.render(
            messages,
            add_generation_prompt=self.options.add_generation_prompt,
            tools=tools,
            template_kwargs={**self.template_kwargs, **self.options.chat_template_kwargs},
        )
        return self._without_end(text, messages[-1]) if self.options.continue_final_message else text

    @staticmethod
    def _without_end(text: str, last: dict[str, Any]) -> str:
        """``text`` up to the end of the last message's content, without the template's closing tokens."""
        final = (last["content"] or "").strip()
        place = text.rfind(final)
        if place < 0:
            message = "The chat template changes the final message, so it cannot be continued."
            raise InvalidParameter("continue_final_message", message)
        return text[: place + len(final)]


def _checked(message: dict[str, Any], where: str) -> dict[str, Any]:
    """``message`` normalised for templates: call arguments as objects, reasoning under a fixed name."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidParameter("messages", f"'{where}.role' must be one of {', '.join(ROLES)}.")
    for key in REFUSED_KEYS:
        if message.get(key):
            raise UnsupportedParameter("messages", f"'{where}.{key}' is not supported by this server.")
    if not isinstance(message.get("tool_call_id"), str | None):
        raise InvalidParameter("messages", f"'{where}.tool_call_id' must be a string.")
    message = dict(message)
    calls, thoughts = message.pop("tool_calls", None), [message.pop(key, None) for key in REASONING_KEYS]
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise InvalidParameter("messages", f"'{where}.tool_calls' must be a list, in a message of the assistant.")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    thought = thoughts[0] or thoughts[1]
    if not isinstance(thought, str | None):
        raise InvalidParameter("messages", f"'{where}.reasoning_content' must be a string.")
    if thought:
        # Most templates use the first name; gpt-oss's uses the second, and rejects it together with content.
        message["reasoning_content"] = thought
        if calls and not message.get("content"):
            message["thinking"] = thought
    return message


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidParameter("messages", f"'{where}' must be of type 'function' and have a 'function'.")
    if not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str | None):
        raise InvalidParameter("messages", f"'{where}' must have strings as 'id' and 'function.name'.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidParameter("messages", f"'{where}.function.arguments' must be a JSON object, as a string.")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
