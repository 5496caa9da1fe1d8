"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic Messages API."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ContextLengthExceeded
from octavo_server.dialects.anthropic.answer import MessageAnswer, MessageStream
from octavo_server.dialects.anthropic.body import (
    Counted,
    MessageBody,
    counted_decoder,
    message_decoder,
    translated,
    translated_message,
    wants_thinking,
    without_effect,
)
from octavo_server.dialects.batches.files import file_reader
from octavo_server.dialects.chat_reply import begin_reply
from octavo_server.dialects.openai.chat import prompt_of, tools_of
from octavo_server.dialects.openai.rendering import json_response
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.sse import finished_choices
from octavo_server.services import services_of
from octavo_server.tenants.api_keys import caller_of


async def create_message(request: Request) -> Response:
    services = services_of(request)
    services.check_room(request)
    services, body, headers = await services.read(request, message_decoder, without_effect)
    chat, names, left_out = translated_message(body, services)
    services.report(request, left_out)
    id = f"msg_{uuid.uuid4().hex}"
    with _length_in_words_of_api():
        reply = await begin_reply(services, chat, request, id, names)
    answer = MessageAnswer(reply, id, services.answering_name(body.model), wants_thinking(body), body.max_tokens)
    if body.stream:
        return MessageStream(reply.generation, answer, headers)
    await finished_choices(reply.generation, request)
    return json_response(answer.unstreamed(), headers)


async def count_tokens(request: Request) -> Response:
    services = services_of(request)
    services, body, headers = await services.read(request, counted_decoder, without_effect)
    services.check_model(body.model)
    chat, names, left_out = translated(body, services)
    services.report(request, left_out)
    with names.in_errors():
        source = prompt_of(chat, services, tools_of(chat, services))
        caller = caller_of(request)
        read_file = file_reader(services.store, caller.name)
        prompt = await services.admission.encode(source, "messages", chat.add_special_tokens, caller, read_file)
    return json_response({"input_tokens": len(prompt.tokens)}, headers)


@contextlib.contextmanager
def _length_in_words_of_api() -> Iterator[None]:
    """Let the error for a prompt beyond the context read as the API's: clients shorten a conversation when they see
    it."""
    try:
        yield
    except ContextLengthExceeded as error:
        if error.num_tokens is not None:
            error.message = f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum"
        else:
            error.message = f"prompt is too long. {error.message}"
        raise


ENDPOINTS = [
    Endpoint("POST", "/v1/messages", create_message, "Answer a conversation, as the Anthropic API does", MessageBody),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, "Count the tokens of a conversation", Counted),
]
