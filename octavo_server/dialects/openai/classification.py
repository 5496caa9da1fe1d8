"""POST /classify and POST /pooling: scores of labels, and results of any pooling task, in vLLM's formats.

https://docs.vllm.ai/en/latest/models/pooling_models.html
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.text.embedding_vectors import Floats, check_dimensions
from octavo.types import Task
from octavo_server.dialects.openai.answer_parts import ReplyIdentity
from octavo_server.dialects.openai.common_fields import ACCEPTED
from octavo_server.dialects.openai.embeddings import InputBody, encoded
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.pooling_requests import num_tokens, numbers, read
from octavo_server.services import ModelServices


class ClassificationBody(InputBody, kw_only=True):
    """The body of a request for the scores of a classifier's labels."""

    use_activation: bool | None = None
    """Whether scores are wanted, not logits; they are by default."""


class PoolingBody(ClassificationBody, kw_only=True):
    """The body of a request for the result of a pooling task."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """By default the first of these that the model has."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    """Of embeddings."""
    normalize: bool | None = None
    """Whether embeddings are normalised; by default as the model's files say."""


REFUSED: dict[str, tuple[Any, ...]] = {"messages": (), "activation": (), "softmax": (), "embed_dtype": ("float32",)}
classification_decoder = BodyDecoder(ClassificationBody, REFUSED, ACCEPTED)
pooling_decoder = BodyDecoder(PoolingBody, REFUSED, ACCEPTED)


async def _results(
    services: ModelServices, request: Request, body: ClassificationBody, task: Task, dimensions: int | None = None
) -> tuple[list[Floats], int]:
    """The result of a task for each text, and the number of tokens of all."""
    choices = await body.choices(services, request, task)
    how: dict[str, Any] = {"is_raw": body.use_activation is False, "dimensions": dimensions}
    if isinstance(body, PoolingBody):
        how["normalizes"] = body.normalize
    return [numbers(services, choice, **how) for choice in choices], num_tokens(choices)


async def classify(request: Request) -> Response:
    services, body, headers = await read(request, classification_decoder)
    found, count = await _results(services, request, body, "classify")
    names = services.engine.info.pooling.labels
    answer = {
        **ReplyIdentity("classify", "list", services.answering_name(body.model)).as_dict(),
        "data": [
            {"index": i, "label": names[int(probs.argmax())], "probs": probs.tolist(), "num_classes": len(probs)}
            for i, probs in enumerate(found)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }
    return json_response(answer, headers)


async def pool(request: Request) -> Response:
    services, body, headers = await read(request, pooling_decoder)
    info = services.engine.info
    first: Task = next((name for name in info.tasks if name not in ("generate", "score")), "embed")
    task = first if body.task is None else body.task
    if body.dimensions is not None:
        if task not in ("embed", "token_embed"):
            raise InvalidParameter("dimensions", f"'dimensions' is for embeddings, not for {task}.")
        size = info.embedding_size if task == "embed" else info.pooling.token_size
        check_dimensions(body.dimensions, size, info.pooling)
    found, count = await _results(services, request, body, task, body.dimensions)

    def render() -> Response:
        answer = {
            **ReplyIdentity("pool", "list", services.answering_name(body.model)).as_dict(),
            "data": [
                {"index": i, "object": "pooling", "data": encoded(data, body.encoding_format)}
                for i, data in enumerate(found)
            ],
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
        }
        return json_response(answer, headers)

    return await asyncio.to_thread(render)  # may render megabytes of JSON


ENDPOINTS = [
    Endpoint("POST", "/classify", classify, "Score a text for each label of a classifier", ClassificationBody),
    Endpoint("POST", "/pooling", pool, "Vectors or labels of texts or of their tokens", PoolingBody),
]
