"""POST /v1/chat/completions/render, /v1/completions/render: a request as the token ids that the model would read.

The answer is a body for /inference/v1/generate of this server or of another one with the same model, in vLLM's form.
https://docs.vllm.ai/en/latest/serving/online_serving/renderer/
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.grammar.forms import FormError
from octavo.sampling_params import OPTIONS
from octavo_server.admission import ClientRequest
from octavo_server.dialects.openai import chat_body, completions
from octavo_server.dialects.openai.common_fields import GenerationFields
from octavo_server.dialects.openai.constraints import OWN_KIND
from octavo_server.generation import Prompt
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.response import json_response
from octavo_server.services import ModelServices, server_of


async def render_chat(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, chat_body.decoder, chat_body.without_effect)
    submitted = chat_body.client_request(body, services, request, chat_body.tools_of(body, services))
    (rendered,) = await generate_bodies(services, submitted, body, "chatcmpl")
    return json_response(rendered, headers)


async def render_completion(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, completions.decoder)
    if body.use_beam_search:
        raise UnsupportedParameter("use_beam_search", "'use_beam_search' is no search over given token ids.")
    submitted = completions.client_request(body, services, request)
    return json_response(await generate_bodies(services, submitted, body, "cmpl"), headers)


async def generate_bodies(
    services: ModelServices, submitted: ClientRequest, body: GenerationFields, prefix: str
) -> list[dict[str, Any]]:
    """A body for /inference/v1/generate for each prompt. Raises ``RequestError``."""
    prompts = await services.admission.rendered(submitted)
    if any(prompt.images for prompt, _ in prompts):
        message = f"'{submitted.prompt_field}' has images, which are no token ids."
        raise UnsupportedParameter(submitted.prompt_field, message)
    own = {
        "model": services.answering_name(body.model),
        "stream": body.stream,
        "stream_options": body.stream_options if body.stream else None,
        "priority": body.priority,
        "cache_salt": body.cache_salt or None,
        "session_id": submitted.session or None,
        "return_token_ids": body.return_token_ids,
        "features": None,
    }
    return [
        {
            "request_id": f"{prefix}-{uuid.uuid4().hex}",
            "token_ids": prompt.tokens,
            "sampling_params": _sampling_params(submitted, prompt, limit),
            **own,
        }
        for prompt, limit in prompts
    ]


def _sampling_params(submitted: ClientRequest, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """What differs from the defaults, and all that a model may have other defaults of. Raises ``InvalidParameter``."""
    params = submitted.params
    fields = {name: getattr(params, name) for name, option in OPTIONS.items() if option.model_key}
    fields |= msgspec.to_builtins(params) | {"max_tokens": max_tokens}
    if submitted.grammar is not None:
        try:
            fields["structured_outputs"] = {OWN_KIND: submitted.grammar(prompt.text or "")}
        except FormError as error:
            raise InvalidParameter(submitted.grammar_field, f"'{submitted.grammar_field}' {error}.") from None
    return fields


ENDPOINTS = [
    Endpoint(
        *("POST", "/v1/chat/completions/render", render_chat, "A conversation as token ids to generate from"),
        chat_body.decoder.documented,
    ),
    Endpoint(
        *("POST", "/v1/completions/render", render_completion, "Prompts as token ids to generate from"),
        completions.decoder.documented,
    ),
]
