"""POST /v1/embeddings: texts or token ids in, their vectors out.

https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.text.embedding_vectors import Floats, check_dimensions
from octavo.types import Task
from octavo_server.dialects.openai.common_fields import ACCEPTED, check_labels
from octavo_server.dialects.openai.completions import prompts_of
from octavo_server.generation import GeneratedChoice
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.pooling_requests import PoolingCall, num_tokens, numbers, read, shortening
from octavo_server.services import ModelServices


class TextFields(msgspec.Struct, kw_only=True):
    """Which model reads the texts, to how many tokens they are shortened, and who asks."""

    model: str = ""
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int = 0
    user: str | None = None

    def call(self, services: ModelServices, request: Request, add_special_tokens: bool = True) -> PoolingCall:
        """What the fields ask for. Raises ``RequestError``."""
        check_labels(services, self.model, self.priority, self.user)
        shorten = shortening(services, self.truncate_prompt_tokens, self.truncation_side)
        return PoolingCall(services, request, self.model, shorten, add_special_tokens, self.priority, self.user)


class InputBody(TextFields, kw_only=True):
    """The body of a request for something of one or several texts."""

    input: str | list[int | str | list[int]]
    add_special_tokens: bool = True

    async def choices(self, services: ModelServices, request: Request, task: Task) -> list[GeneratedChoice]:
        """The result of a task for each text. Raises ``RequestError``."""
        call = self.call(services, request, self.add_special_tokens)
        return await call.ask(task, prompts_of(self.input, "input"), "input")


class EmbeddingBody(InputBody, kw_only=True):
    """The body of an embedding request with one or several texts."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


decoder = BodyDecoder(EmbeddingBody, {"messages": ()}, ACCEPTED)


async def create_embeddings(request: Request) -> Response:
    services, body, headers = await read(request, decoder)
    info = services.engine.info
    check_dimensions(body.dimensions, info.embedding_size, info.pooling)
    choices = await body.choices(services, request, "embed")
    count = num_tokens(choices)

    def render() -> Response:
        answer = {
            "id": f"embd-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": encoded(numbers(services, choice, dimensions=body.dimensions), body.encoding_format),
                }
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


def encoded(data: Floats, encoding_format: str) -> Any:
    """Numbers, or a list of them for each token; in base64 all of them one after the other."""
    return base64.b64encode(data.tobytes()).decode() if encoding_format == "base64" else data.tolist()
