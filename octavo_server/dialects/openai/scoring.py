"""POST /v1/score and /v1/rerank: similarity scores, in the formats of vLLM and of Jina AI.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, https://api.jina.ai/redoc. A cross-encoder
reads both texts at once; with an embedding model, the score is the cosine similarity of the two vectors.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.text.embedding_vectors import pairs_of
from octavo_server.dialects.openai.answer_parts import ReplyIdentity
from octavo_server.dialects.openai.common_fields import ACCEPTED
from octavo_server.dialects.openai.embeddings import TextFields
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.pooling_requests import read
from octavo_server.services import ModelServices


class ScoreBody(TextFields, kw_only=True):
    """The body of a scoring request: one text with each of several, or two lists of equal length."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(msgspec.Struct, kw_only=True):
    """A document given as an object."""

    text: str


class RerankBody(TextFields, kw_only=True):
    """The body of a request to rank documents by relevance to a query."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool = True


REFUSED: dict[str, tuple[Any, ...]] = {"max_tokens_per_doc": (), "rank_fields": ()}
score_decoder = BodyDecoder(ScoreBody, REFUSED, ACCEPTED)
rerank_decoder = BodyDecoder(RerankBody, REFUSED, ACCEPTED)


async def score(request: Request) -> Response:
    services, body, headers = await read(request, score_decoder)
    call, pairs = body.call(services, request), pairs_of(body.text_1, body.text_2)
    found, count = await call.scores(pairs, ("text_1", "text_2"))
    answer = {
        **ReplyIdentity("score", "list", services.model_name).as_dict(),
        "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(found)],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    return json_response(answer, headers)


async def rerank(request: Request) -> Response:
    return await rerank_documents(*await read(request, rerank_decoder), request)


async def rerank_documents(
    services: ModelServices, body: RerankBody, headers: dict[str, str], request: Request
) -> Response:
    """The documents, or the best of them, with their scores. Raises ``RequestError``."""
    call = body.call(services, request)
    if not body.documents:
        raise InvalidParameter("documents", "'documents' must not be empty.")
    if body.top_n is not None and body.top_n < 1:
        raise InvalidParameter("top_n", f"'top_n' must be at least 1, not {body.top_n}.")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    pairs = [(body.query, text) for text in texts]
    found, count = await call.scores(pairs, ("query", "documents"))
    order = sorted(range(len(texts)), key=lambda i: (-found[i], i))[: body.top_n]
    results = [
        {"index": i, "relevance_score": found[i]} | ({"document": {"text": texts[i]}} if body.return_documents else {})
        for i in order
    ]
    answer = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": services.model_name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "results": results,
    }
    return json_response(answer, headers)


ENDPOINTS = [
    *(
        Endpoint("POST", path, score, "Score how well texts go together", ScoreBody, name=name)
        for path, name in (("/v1/score", "score"), ("/score", "score_by_vllms_path"))
    ),
    *(
        Endpoint("POST", path, rerank, "Put documents in the order in which they suit a query", RerankBody, name=name)
        for path, name in (("/v1/rerank", "rerank"), ("/v2/rerank", "rerank_by_coheres_path"))
    ),
]
