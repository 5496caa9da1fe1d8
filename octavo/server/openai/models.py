"""GET /v1/models: the one model that this server serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.front import Front, front_of
from octavo.server.openai.rendering import json_response

router = APIRouter()


@router.get("/v1/models", summary="List the models")
async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(front_of(request))]}, {})


# A model's name may have slashes.
@router.get("/v1/models/{name:path}", summary="Describe one model")
async def retrieve_model(request: Request, name: str) -> Response:
    front = front_of(request)
    front.check_model(name)
    return json_response(_model(front), {})


def _model(front: Front) -> dict[str, Any]:
    return {
        "id": front.model_name,
        "object": "model",
        "created": front.created,
        "owned_by": "octavo",
        "max_model_len": front.engine.info.max_model_len,
    }
