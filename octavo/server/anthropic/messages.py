"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic Messages API."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.anthropic.answer import MessageAnswer, MessageStream
from octavo.server.anthropic.body import (
    Counted,
    MessageBody,
    chat_body,
    counted_decoder,
    message_chat_body,
    message_decoder,
    wants_thinking,
    without_effect,
)
from octavo.server.chat_reply import begin_reply
from octavo.server.keys import caller_of
from octavo.server.openai.chat import conversation, tools_of
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint
from octavo.server.services import services_of
from octavo.server.sse import finished_choices


async def create_message(request: Request) -> Response:
    services = services_of(request)
    services.check_room(request)
    services, body, headers = await services.read(request, message_decoder, without_effect)
    id = f"msg_{uuid.uuid4().hex}"
    reply = await begin_reply(services, message_chat_body(body, services), request, id)
    answer = MessageAnswer(reply, id, services.answering_name(body.model), wants_thinking(body))
    if body.stream:
        return MessageStream(reply.generation, answer, headers)
    await finished_choices(reply.generation, request)
    return json_response(answer.unstreamed(), headers)


async def count_tokens(request: Request) -> Response:
    services = services_of(request)
    services, body, headers = await services.read(request, counted_decoder, without_effect)
    services.check_model(body.model)
    chat = chat_body(body, services)
    source = conversation(chat.messages, chat, services, tools_of(chat, services)).prompt
    prompt = await services.admission.encode(source, "messages", chat.add_special_tokens, caller_of(request))
    return json_response({"input_tokens": len(prompt.tokens)}, headers)


ENDPOINTS = [
    Endpoint("POST", "/v1/messages", create_message, "Answer a conversation, as the Anthropic API does", MessageBody),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, "Count the tokens of a conversation", Counted),
]
