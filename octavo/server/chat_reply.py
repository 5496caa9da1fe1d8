"""A chat reply for APIs other than chat completions (Anthropic messages, OpenAI responses).

They convert their body to a chat completion's, so that each field is validated in one place, and render the parsed
pieces of the reply in their own format.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from octavo.server.durable.serve import admit_inner
from octavo.server.generation import Choice, Generation
from octavo.server.openai.chat import ChatBody, client_request, tools_of
from octavo.server.openai.chat_message import chat_message
from octavo.server.services import Services
from octavo.text.reader import Call, Piece, Text


class ChatReply:
    """The single choice of a generation, parsed into pieces: content, reasoning and tool calls."""

    def __init__(self, services: Services, body: ChatBody, generation: Generation) -> None:
        self.generation = generation
        self.choice: Choice = generation.choices[0]
        tools = tools_of(body, services)
        prompt = self.choice.prompt.text or ""
        is_begun = body.continue_final_message
        self._message = chat_message(services.message_format, tools, prompt, is_begun, body.stream)

    def pieces(self) -> list[Piece]:
        """The pieces that became unambiguous since the last call."""
        text = self.choice.take().text
        if self._message is not None:
            return self._message.pieces(text, self.choice.finish_reason)
        return [Text("content", text)] if text else []


def members_of(call: Call) -> dict[str, Any]:
    """The arguments of a call as an object; if they are cut or no JSON, the members that are complete before that."""
    try:
        value = _value_of(call.arguments)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    # Half a character, which JSON can name, is no text.
    members: dict[str, Any] = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return members


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return from_json(text[: error.pos] or "{}", allow_partial=True)


async def begin_reply(
    services: Services, body: ChatBody, request: Request, id: str, is_durable: bool = False
) -> ChatReply:
    """Submit a conversation; its timeline is registered under ``id``. Raises ``RequestError``; nothing has been started
    then.

    With ``is_durable``, and if there is a journal, ``id`` is the request's key there.
    """
    tools = tools_of(body, services)
    submitted = client_request(body, services, request, tools)
    if is_durable:
        generation = await admit_inner(services, request, id, submitted)
    else:
        generation = await services.admission.admit(submitted)
    services.engine.timelines.name(id, [choice.request.id for choice in generation.choices])
    return ChatReply(services, body, generation)
