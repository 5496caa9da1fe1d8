"""POST /api/chat and /api/generate: Ollama's API."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.text.reader import Piece, Text
from octavo_server.dialects.chat_reply import begin_reply
from octavo_server.dialects.ollama.answer import LineStream, OllamaAnswer, as_message, as_response, now
from octavo_server.dialects.ollama.body import (
    Common,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_body,
    chat_decoder,
    generate_chat_body,
    generate_decoder,
    generation_fields,
    served_name,
    without_effect,
)
from octavo_server.dialects.openai import completions
from octavo_server.dialects.openai.fields import NO_LIMIT
from octavo_server.dialects.openai.rendering import json_response
from octavo_server.generation import Choice, Generation
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.errors import UnsupportedParameter
from octavo_server.http.sse import finished_choices
from octavo_server.services import Services, services_of


async def chat(request: Request) -> Response:
    services, started = services_of(request), time.monotonic()
    services.check_room(request)
    services, body, headers = await services.read(request, chat_decoder, without_effect)
    if not body.messages:
        return await _loaded(body, services, as_message({"content": ""}))
    reply = await begin_reply(services, chat_body(body, services), request, f"ollama-{uuid.uuid4().hex}")
    answer = OllamaAnswer(reply.pieces, body.model, as_message, started)
    return await _answered(reply.generation, answer, body, headers, request)


async def generate(request: Request) -> Response:
    services, started = services_of(request), time.monotonic()
    services.check_room(request)
    services, body, headers = await services.read(request, generate_decoder, without_effect)
    if not body.prompt and not body.images:
        return await _loaded(body, services, as_response({"content": ""}))
    is_plain = body.raw or services.chat_template.source is None
    if is_plain and body.images:
        raise UnsupportedParameter("images", "'images' need a chat template, and no 'raw'.")
    if is_plain:
        generation = await _continuation(body, services, request)
        pieces = _plain_pieces(generation.choices[0])
    else:
        id = f"ollama-{uuid.uuid4().hex}"
        reply = await begin_reply(services, generate_chat_body(body, services), request, id)
        generation, pieces = reply.generation, reply.pieces
    answer = OllamaAnswer(pieces, body.model, as_response, started)
    return await _answered(generation, answer, body, headers, request)


ENDPOINTS = [
    Endpoint("POST", "/api/chat", chat, "Answer a conversation, as Ollama does", OllamaChatBody),
    Endpoint("POST", "/api/generate", generate, "Answer or continue a text, as Ollama does", OllamaGenerateBody),
]


async def _continuation(body: OllamaGenerateBody, services: Services, request: Request) -> Generation:
    fields = {"max_tokens": NO_LIMIT, **generation_fields(body, services), "prompt": body.prompt}
    completion = msgspec.convert(fields, type=completions.CompletionBody)
    return await services.admission.admit(completions.client_request(completion, services, request))


def _plain_pieces(choice: Choice) -> Any:
    """A function that returns the choice's new text as pieces."""

    def pieces() -> list[Piece]:
        text = choice.take().text
        return [Text("content", text)] if text else []

    return pieces


async def _loaded(body: Common, services: Services, nothing: dict[str, Any]) -> Response:
    """The answer to a request without a prompt, which only asks for the model to be loaded."""
    services.check_model(served_name(body.model, services))
    await services.engine.wake_up()
    return json_response({"model": body.model, "created_at": now(), **nothing, "done": True, "done_reason": "load"}, {})


async def _answered(
    generation: Generation, answer: OllamaAnswer, body: Common, headers: dict[str, str], request: Request
) -> Response:
    if body.stream:
        return LineStream(generation, answer, headers)
    choices = await finished_choices(generation, request)
    return json_response(answer.unstreamed(choices[0]), headers)
