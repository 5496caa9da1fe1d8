"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic API's way to converse."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.anthropic.answer import MessageAnswer, MessageStream
from octavo.server.anthropic.body import (
    Counted,
    MessageBody,
    chat_body,
    counted_reader,
    message_chat_body,
    message_reader,
    wants_thinking,
    without_effect,
)
from octavo.server.front import front_of
from octavo.server.openai.chat import conversation, tools_of
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint
from octavo.server.reply import begin_reply
from octavo.server.sse import whole


async def create_message(request: Request) -> Response:
    front = front_of(request)
    front.admission.check_room()
    body, headers = await front.read(request, message_reader, without_effect)
    id = f"msg_{uuid.uuid4().hex}"
    reply = await begin_reply(front, message_chat_body(body, front), request, id)
    answer = MessageAnswer(reply, id, front.answering_name(body.model), wants_thinking(body))
    if body.stream:
        return MessageStream(reply.generation, answer, headers)
    await whole(reply.generation, request)
    return json_response(answer.whole(), headers)


async def count_tokens(request: Request) -> Response:
    front = front_of(request)
    body, headers = await front.read(request, counted_reader, without_effect)
    front.check_model(body.model)
    chat = chat_body(body, front)
    source = conversation(chat.messages, chat, front, tools_of(chat, front)).prompt
    prompt = await front.admission.encode(source, "messages", chat.add_special_tokens)
    return json_response({"input_tokens": len(prompt.tokens)}, headers)


ENDPOINTS = [
    Endpoint("POST", "/v1/messages", create_message, "Answer a conversation, as the Anthropic API does", MessageBody),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, "Count the tokens of a conversation", Counted),
]
