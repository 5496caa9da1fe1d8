"""One reply of the model to a conversation, for the APIs that word it otherwise than chat completions do.

They turn their body into that of a chat completion, so that every field has one check and one meaning, and word the
pieces of the reply themselves.
"""

from __future__ import annotations

from starlette.requests import Request

from octavo.server.generation import Choice, Generation
from octavo.server.openai.chat import ChatBody, asked, tools_of
from octavo.server.openai.chat_message import chat_message
from octavo.server.services import Services
from octavo.text.reader import Piece, Text


class ChatReply:
    """The one choice of a generation, read piece by piece: content, reasoning, and calls of functions."""

    def __init__(self, services: Services, body: ChatBody, generation: Generation) -> None:
        self.generation = generation
        self.choice: Choice = generation.choices[0]
        tools = tools_of(body, services)
        self._message = chat_message(services.message_format, tools, self.choice.prompt.text or "")

    def pieces(self) -> list[Piece]:
        """What is certain since the last call."""
        text = self.choice.take().text
        if self._message is not None:
            return self._message.pieces(text, self.choice.finish_reason)
        return [Text("content", text)] if text else []


async def begin_reply(services: Services, body: ChatBody, request: Request, id: str) -> ChatReply:
    """Have a conversation answered, under an ``id`` by which its timeline is found. Raises ``RequestError``; then
    nothing was started."""
    tools = tools_of(body, services)
    generation = await services.admission.admit(asked(body, services, request, tools))
    services.engine.timelines.name(id, [choice.request.id for choice in generation.choices])
    return ChatReply(services, body, generation)
