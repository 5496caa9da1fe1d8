"""A conversation as clients send it, and the way from it to a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from octavo.errors import InvalidParameter
from octavo.server.errors import UnsupportedParameter
from octavo.text.chat_messages import normalise_messages
from octavo.text.chat_template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant")
REFUSED_ROLES = ("tool", "function")
REFUSED_KEYS = ("tool_calls", "tool_call_id", "function_call", "audio")


class TemplateOptions(Protocol):
    """The fields of a body that say how a conversation becomes a prompt."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages with the way to put them into a prompt. Raises ``InvalidParameter`` when they cannot be served."""

    messages: list[dict[str, Any]]
    options: TemplateOptions
    template: ChatTemplate

    def __post_init__(self) -> None:
        if not self.messages:
            raise InvalidParameter("messages", "'messages' must not be empty.")
        for place, message in enumerate(self.messages):
            _check(message, f"messages[{place}]")
        if self.options.continue_final_message and self.options.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message",
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            )

    def prompt(self) -> str:
        """The text for the model. Runs the template, so call it in a thread. Raises ``InvalidParameter``."""
        text = self.template.render(
            self.messages,
            add_generation_prompt=self.options.add_generation_prompt,
            template_kwargs=self.options.chat_template_kwargs,
        )
        return self._without_end(text) if self.options.continue_final_message else text

    def _without_end(self, text: str) -> str:
        """``text`` up to the end of the final message, without what the template closes it with."""
        final = normalise_messages(self.messages)[-1]["content"].strip()
        place = text.rfind(final)
        if place < 0:
            message = "The chat template changes the final message, so it cannot be continued."
            raise InvalidParameter("continue_final_message", message)
        return text[: place + len(final)]


def _check(message: dict[str, Any], where: str) -> None:
    role = message.get("role")
    if role in REFUSED_ROLES:
        raise UnsupportedParameter("messages", f"'{where}': results of tools are not supported by this server.")
    if role not in ROLES:
        raise InvalidParameter("messages", f"'{where}.role' must be one of {', '.join(ROLES)}.")
    for key in REFUSED_KEYS:
        if message.get(key):
            raise UnsupportedParameter("messages", f"'{where}.{key}' is not supported by this server.")
