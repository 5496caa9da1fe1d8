"""POST /v1/generate and POST /generate: minimal text completion."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ContextLengthExceeded, InvalidParameter, QueueFull
from octavo_server.dialects.native.dialect import with_statuses
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.dialects.openai.rendering import json_response
from octavo_server.generation import Choice
from octavo_server.http.body_decoder import BodyDecoder, MalformedJSON
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.sse import finished_choices
from octavo_server.services import Services, services_of

MAX_PROMPT_CHARACTERS = 8000
MAX_NEW_TOKENS = 512
STOPPED = "Sequences generated EOS token."


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of a request for exactly ``max_new_tokens`` tokens; end-of-text is ignored."""

    prompt: str
    max_new_tokens: int = 64
    temperature: float = 0.0
    timeout: float | None = None


class PlainBody(msgspec.Struct, kw_only=True):
    """The body of a request for at most ``max_tokens`` tokens."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    timeout: float | None = None


generate_decoder = BodyDecoder(GenerateBody, {}, frozenset())
plain_decoder = BodyDecoder(PlainBody, {}, frozenset())


async def generate(request: Request) -> Response:
    services, start = services_of(request), time.monotonic()
    services.check_room(request)
    services, body, headers = await services.read(request, generate_decoder)
    if not 1 <= len(body.prompt) <= MAX_PROMPT_CHARACTERS:
        raise InvalidParameter("prompt", f"'prompt' must have 1 to {MAX_PROMPT_CHARACTERS} characters.")
    if not 1 <= body.max_new_tokens <= MAX_NEW_TOKENS:
        raise InvalidParameter("max_new_tokens", f"'max_new_tokens' must be from 1 to {MAX_NEW_TOKENS}.")
    completion = CompletionBody(
        prompt=body.prompt,
        max_tokens=body.max_new_tokens,
        ignore_eos=True,
        temperature=body.temperature,
        timeout=body.timeout,
    )
    choice = await _finished(services, completion, request)
    result = {
        "request_id": str(uuid.uuid4()),
        "text": choice.take().text,
        "generated_tokens": choice.num_tokens,
        "latency_ms": round((time.monotonic() - start) * 1000, 3),
        "finish_reason": choice.finish_reason,
        "model": services.model_name,
    }
    return json_response(result, headers)


async def generate_plainly(request: Request) -> Response:
    services = services_of(request)
    services.check_room(request)
    services, body, headers = await services.read(request, plain_decoder)
    for field, is_bad in (("prompt", not body.prompt.strip()), ("max_tokens", body.max_tokens < 1)):
        if is_bad:
            raise BadValue(field, f"'{field}' must not be empty." if field == "prompt" else f"'{field}' is below 1.")
    completion = CompletionBody(
        prompt=body.prompt, max_tokens=body.max_tokens, temperature=body.temperature, timeout=body.timeout
    )
    choice = await _finished(services, completion, request)
    is_cut = choice.finish_reason == "length"
    result = {
        "request_id": str(uuid.uuid4()),
        "prompt": body.prompt,
        "generated_text": body.prompt + choice.take().text,
        "token_count": choice.num_tokens,
        "stop_reason": f"Reached max_tokens limit of {body.max_tokens}." if is_cut else STOPPED,
    }
    return json_response(result, headers)


class BadValue(InvalidParameter):
    """A value of the right type that is out of range."""


async def _finished(services: Services, body: CompletionBody, request: Request) -> Choice:
    choices = await finished_choices(await services.admission.admit(client_request(body, services, request)), request)
    return choices[0]


_STATUSES: dict[Any, int] = {BadValue: 400, ContextLengthExceeded: 400, InvalidParameter: 422, MalformedJSON: 422}

ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/generate",
        with_statuses(generate, _STATUSES),
        f"Continue a text of at most {MAX_PROMPT_CHARACTERS:,} characters by exactly 1 to {MAX_NEW_TOKENS} tokens",
        GenerateBody,
    ),
    Endpoint(
        "POST",
        "/generate",
        with_statuses(generate_plainly, {**_STATUSES, QueueFull: 503}),
        "Continue a text",
        PlainBody,
    ),
]
