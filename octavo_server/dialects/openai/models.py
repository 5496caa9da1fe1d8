"""GET /v1/models: the served model, under each of its names, and its adapters.

https://platform.openai.com/docs/api-reference/models, and https://docs.anthropic.com/en/api/models-list for clients
that send the header of that API.
"""

from __future__ import annotations

import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo_server.http.endpoint import Endpoint
from octavo_server.http.response import json_response
from octavo_server.services import ModelServices, server_of


async def list_models(request: Request) -> Response:
    models = [(services, name) for services in server_of(request).models for name in services.served_names]
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
    return json_response(_anthropic_model(services, name) if _is_anthropic(request) else _model(services, name), {})


ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, "List the models"),
    # Model names may contain slashes.
    Endpoint("GET", "/v1/models/{name:path}", retrieve_model, "Describe one model"),
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
