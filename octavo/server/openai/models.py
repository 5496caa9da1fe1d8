"""GET /v1/models: the one model that this server serves."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.front import Front, front_of
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint


async def list_models(request: Request) -> Response:
    front = front_of(request)
    names = [front.model_name, *front.engine.adapters.paths]
    return json_response({"object": "list", "data": [_model(front, name) for name in names]}, {})


async def retrieve_model(request: Request) -> Response:
    front = front_of(request)
    name = request.path_params["name"]
    front.check_model(name)
    return json_response(_model(front, name), {})


ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, "List the models"),
    # A model's name may have slashes.
    Endpoint("GET", "/v1/models/{name:path}", retrieve_model, "Describe one model"),
]


def _model(front: Front, name: str) -> dict[str, Any]:
    path = front.engine.adapters.paths.get(name)
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "octavo",
        "max_model_len": front.engine.info.max_model_len,
        "sampling_defaults": front.engine.info.sampling_defaults,
        # Load clients take their tokenizer from there.
        "root": path or front.config.model.model,
        **({} if path is None else {"parent": front.model_name}),
    }
