"""POST /classify and POST /pooling: scores of labels, and results of any pooling task, in vLLM's formats.

https://docs.vllm.ai/en/latest/models/pooling_models.html
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.text.vectors import Floats, check_dimensions
from octavo.types import Task
from octavo_server.dialects.openai.completions import prompts_of
from octavo_server.dialects.openai.fields import ACCEPTED, check_labels
from octavo_server.dialects.openai.rendering import Identity
from octavo_server.http.body_decoder import BodyDecoder
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.sse import json_response
from octavo_server.pooling import ask, num_tokens, numbers, shortening
from octavo_server.services import ModelServices, server_of


class ClassificationBody(msgspec.Struct, kw_only=True):
    """The body of a request for the scores of a classifier's labels."""

    model: str = ""
    input: str | list[int | str | list[int]]
    use_activation: bool | None = None
    """Whether scores are wanted, not logits; they are by default."""
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int = 0
    user: str | None = None


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
    check_labels(services, body.model, body.priority, body.user)
    choices = await ask(
        services,
        request,
        task,
        body.model,
        prompts_of(body.input, "input"),
        "input",
        add_special_tokens=body.add_special_tokens,
        shorten=shortening(services, body.truncate_prompt_tokens, body.truncation_side),
        priority=body.priority,
        user=body.user,
    )
    how: dict[str, Any] = {"is_raw": body.use_activation is False, "dimensions": dimensions}
    if isinstance(body, PoolingBody):
        how["normalizes"] = body.normalize
    return [numbers(services, choice, **how) for choice in choices], num_tokens(choices)


async def classify(request: Request) -> Response:
    server = server_of(request)
    server.check_room(request)
    services, body, headers = await server.read(request, classification_decoder)
    found, count = await _results(services, request, body, "classify")
    names = services.engine.info.pooling.labels
    answer = {
        **Identity("classify", "list", services.answering_name(body.model)).as_dict(),
        "data": [
            {"index": i, "label": names[int(probs.argmax())], "probs": probs.tolist(), "num_classes": len(probs)}
            for i, probs in enumerate(found)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }
    return json_response(answer, headers)


async def pool(request: Request) -> Response:
    server = server_of(request)
    server.check_room(request)
    services, body, headers = await server.read(request, pooling_decoder)
    info = services.engine.info
    first: Task = next((name for name in info.tasks if name not in ("generate", "score")), "embed")
    task = first if body.task is None else body.task
    if body.dimensions is not None:
        if task not in ("embed", "token_embed"):
            raise InvalidParameter("dimensions", f"'dimensions' is for embeddings, not for {task}.")
        check_dimensions(body.dimensions, info.embedding_size if task == "embed" else info.pooling.token_size)
    found, count = await _results(services, request, body, task, body.dimensions)

    def render() -> Response:
        answer = {
            **Identity("pool", "list", services.answering_name(body.model)).as_dict(),
            "data": [{"index": i, "object": "pooling", "data": _shown(data, body)} for i, data in enumerate(found)],
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
        }
        return json_response(answer, headers)

    return await asyncio.to_thread(render)  # may render megabytes of JSON


def _shown(data: Floats, body: PoolingBody) -> Any:
    """Numbers, or a list of them for each token; in base64 all of them one after the other."""
    return base64.b64encode(data.tobytes()).decode() if body.encoding_format == "base64" else data.tolist()


ENDPOINTS = [
    Endpoint("POST", "/classify", classify, "Score a text for each label of a classifier", ClassificationBody),
    Endpoint("POST", "/pooling", pool, "Vectors or labels of texts or of their tokens", PoolingBody),
]
