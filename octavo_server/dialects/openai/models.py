"""GET /v1/models: the served model, under each of its names, and its adapters.

https://platform.openai.com/docs/api-reference/models, and https://docs.anthropic.com/en/api/models-list for clients
that send the header of that API; https://ai.google.dev/api/models, under ``/v1beta``.
"""

from __future__ import annotations

import datetime
import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo_server.dialects.gemini.endpoints import ERRORS
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.response import json_response
from octavo_server.services import ModelServices, server_of


async def list_models(request: Request) -> Response:
    models = [(services, name) for services in server_of(request).models for name in services.served_names]
    if request.url.path.startswith(GOOGLE):
        return json_response({"models": [_google_model(*each) for each in models]}, {})
    if _is_anthropic(request):
        names = [name for _, name in models]
        # Always one page, regardless of 'limit': the operator's configuration bounds the number.
        return json_response(
            {
                "data": [_anthropic_model(*each) for each in models],
                "has_more": False,
                "first_id": names[0],
                "last_id": names[-1],
            },
            {},
        )
    return json_response({"object": "list", "data": [_model(*each) for each in models]}, {})


async def retrieve_model(request: Request) -> Response:
    name = request.path_params["name"]
    services = server_of(request).of_model(name)
    services.check_model(name, must_be_served=True)
    shown = _google_model if request.url.path.startswith(GOOGLE) else _model
    return json_response((_anthropic_model if _is_anthropic(request) else shown)(services, name), {})


GOOGLE = "/v1beta/models"
_read = functools.partial(Endpoint, "GET", errors=ERRORS)
ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, "List the models"),
    # Model names may contain slashes.
    Endpoint("GET", "/v1/models/{name:path}", retrieve_model, "Describe one model"),
    _read(GOOGLE, list_models, "List the models, as Gemini does", name="list_gemini_models"),
    _read(GOOGLE + "/{name:path}", retrieve_model, "Describe one, as Gemini does", name="retrieve_gemini_model"),
]


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _model(services: ModelServices, name: str) -> dict[str, Any]:
    path = services.engine.adapters.paths.get(name)
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "octavo",
        "max_model_len": services.engine.info.max_model_len,
        # Without these three, Mistral's SDK does not know what the model is.
        "type": "base",
        "max_context_length": services.engine.info.max_model_len,
        "capabilities": {
            "completion_chat": "generate" in services.engine.info.tasks,
            "vision": services.takes_images,
        },
        "input_modalities": ["text", *services.takes],
        "sampling_defaults": services.engine.info.sampling_defaults,
        # Load generators load their tokenizer from this path.
        "root": path or services.config.model.model,
        **({} if path is None else {"parent": services.model_name}),
    }


def _anthropic_model(services: ModelServices, name: str) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(services.created, datetime.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": services.engine.info.max_model_len,
        "max_tokens": services.engine.info.max_model_len,
        "lifecycle": "active",
        **dict.fromkeys(("capabilities", "deprecated_at", "line", "retires_at")),
    }


def _google_model(services: ModelServices, name: str) -> dict[str, Any]:
    info = services.engine.info
    methods = {"generate": ("generateContent", "countTokens"), "embed": ("embedContent", "batchEmbedContents")}
    return {
        "name": f"models/{name}",
        "version": "001",
        "displayName": name,
        "inputTokenLimit": info.max_model_len,
        "outputTokenLimit": info.max_model_len,
        "supportedGenerationMethods": [method for task in info.tasks for method in methods.get(task, ())],
        "thinking": services.message_format.can_reason,
    }
