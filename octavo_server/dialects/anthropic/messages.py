"""POST /v1/messages and what else asks about a message: the Anthropic Messages API."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ContextLengthExceeded
from octavo_server.dialects.anthropic.answer import ERRORS, MessageAnswer, MessageStream
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
from octavo_server.dialects.chat_reply import ChatReply, FieldNames, chat_request, num_prompt_tokens, submission
from octavo_server.dialects.openai.render import generate_bodies
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.response import json_response
from octavo_server.pipeline import Dialect, Submission
from octavo_server.services import ModelServices, server_of


async def _translate(body: MessageBody, services: ModelServices, request: Request) -> Submission:
    chat, names, left_out = translated_message(body, services)
    services.report(request, left_out)
    model, shows_thinking = services.answering_name(body.model), wants_thinking(body)

    def answer(reply: ChatReply) -> MessageAnswer:
        return MessageAnswer(reply, f"msg_{uuid.uuid4().hex}", model, shows_thinking, body.max_tokens)

    asked = submission(services, chat, request, answer, MessageStream, names)
    return dataclasses.replace(asked, in_words=lambda: _words_of_api(names))


async def count_tokens(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, counted_decoder, without_effect)
    services.check_model(body.model)
    chat, names, left_out = translated(body, services)
    services.report(request, left_out)
    return json_response({"input_tokens": await num_prompt_tokens(services, chat, request, names)}, headers)


async def render_message(request: Request) -> Response:
    """A body for /inference/v1/generate."""
    services, body, headers = await server_of(request).read(request, message_decoder, without_effect)
    services.check_model(body.model)
    chat, names, left_out = translated_message(body, services)
    services.report(request, left_out)
    with _words_of_api(names):
        (rendered,) = await generate_bodies(services, chat_request(services, chat, request, names), chat, "msg")
    return json_response(rendered, headers)


@contextlib.contextmanager
def _words_of_api(names: FieldNames) -> Iterator[None]:
    """Let errors name the API's fields, and the one for a prompt beyond the context read as the API's: clients shorten
    a conversation when they see it."""
    try:
        with names.in_errors():
            yield
    except ContextLengthExceeded as error:
        if error.num_tokens is not None:
            error.message = f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum"
        else:
            error.message = f"prompt is too long. {error.message}"
        raise


MESSAGE = Dialect(message_decoder, _translate, without_effect)
ENDPOINTS = [
    MESSAGE.endpoint("/v1/messages", "Answer a conversation, as the Anthropic API does", "create_message", ERRORS),
    Endpoint(
        *("POST", "/v1/messages/count_tokens", count_tokens, "Count the tokens of a conversation", Counted),
        errors=ERRORS,
    ),
    Endpoint(
        *("POST", "/v1/messages/render", render_message, "A conversation as token ids to generate from", MessageBody),
        errors=ERRORS,
    ),
]
