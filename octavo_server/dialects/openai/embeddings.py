"""POST /v1/embeddings: texts or token ids in, their vectors out.

https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.text.vectors import Floats, check_dimensions
from octavo_server.dialects.openai.completions import prompts_of
from octavo_server.dialects.openai.fields import ACCEPTED, check_labels
from octavo_server.http.body_decoder import BodyDecoder
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.sse import json_response
from octavo_server.pooling import ask, num_tokens, numbers, shortening
from octavo_server.services import server_of


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The body of an embedding request with one or several texts."""

    model: str = ""
    input: str | list[int | str | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int = 0
    user: str | None = None


decoder = BodyDecoder(EmbeddingBody, {"messages": ()}, ACCEPTED)


async def create_embeddings(request: Request) -> Response:
    server = server_of(request)
    server.check_room(request)
    services, body, headers = await server.read(request, decoder)
    check_labels(services, body.model, body.priority, body.user)
    check_dimensions(body.dimensions, services.engine.info.embedding_size)
    choices = await ask(
        services,
        request,
        "embed",
        body.model,
        prompts_of(body.input, "input"),
        "input",
        add_special_tokens=body.add_special_tokens,
        shorten=shortening(services, body.truncate_prompt_tokens, body.truncation_side),
        priority=body.priority,
        user=body.user,
    )
    count = num_tokens(choices)

    def render() -> Response:
        answer = {
            "object": "list",
            "data": [
                _entry(index, numbers(services, choice, dimensions=body.dimensions), body)
                for index, choice in enumerate(choices)
            ],
            "model": services.answering_name(body.model),
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
        return json_response(answer, headers)

    return await asyncio.to_thread(render)  # may render megabytes of JSON


ENDPOINTS = [
    Endpoint("POST", "/v1/embeddings", create_embeddings, "Turn texts into vectors", EmbeddingBody),
]


def _entry(index: int, vector: Floats, body: EmbeddingBody) -> dict[str, Any]:
    is_text = body.encoding_format == "base64"
    shown = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
    return {"object": "embedding", "index": index, "embedding": shown}
