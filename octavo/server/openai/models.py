"""GET /v1/models: the one model that this server serves."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.front import Front, front_of
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(front_of(request))]}, {})


async def retrieve_model(request: Request) -> Response:
    front = front_of(request)
    front.check_model(request.path_params["name"])
    return json_response(_model(front), {})


ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, "List the models"),
    # A model's name may have slashes.
    Endpoint("GET", "/v1/models/{name:path}", retrieve_model, "Describe one model"),
]


def _model(front: Front) -> dict[str, Any]:
    return {
        "id": front.model_name,
        "object": "model",
        "created": front.created,
        "owned_by": "octavo",
        "max_model_len": front.engine.info.max_model_len,
        "sampling_defaults": front.engine.info.sampling_defaults,
    }
