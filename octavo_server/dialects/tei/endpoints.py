"""POST /embed, /embed_all, /embed_sparse, /rerank, /predict and /similarity: the API of Text Embeddings Inference.

https://huggingface.github.io/text-embeddings-inference/. Names of models are not part of it: a server with several
takes the first.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.text.embedding_vectors import check_dimensions, pairs_of
from octavo.types import Task
from octavo_server.admission import PromptSource
from octavo_server.dialects.openai.completions import prompts_of
from octavo_server.dialects.openai.scoring import Document, RerankBody, rerank_documents
from octavo_server.generation import GeneratedChoice
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter, typed_errors
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.observe.probes import version
from octavo_server.pooling_requests import MAX_TEXTS, WHOLE_CONTEXT, PoolingCall, numbers, read, shortening
from octavo_server.services import ModelServices

SIDES: dict[str, Literal["left", "right"]] = {"Left": "left", "Right": "right", "left": "left", "right": "right"}


ERRORS = typed_errors(
    "TEIError",
    ("Overloaded", "Validation", "Backend"),
    ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity"),
)


class TruncatedBody(msgspec.Struct, kw_only=True):
    """What every body has."""

    truncate: bool | None = None
    """Whether texts that are too long lose what does not fit; else they are refused."""
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"

    def call(self, services: ModelServices, request: Request) -> PoolingCall:
        """What the fields ask for."""
        return _call(services, request, self.truncate, SIDES[self.truncation_direction])


def _call(
    services: ModelServices, request: Request, truncate: bool | None, side: Literal["left", "right"] | None
) -> PoolingCall:
    shorten = shortening(services, WHOLE_CONTEXT, side) if truncate else None
    return PoolingCall(services, request, services.model_name, shorten)


class EmbedInputsBody(TruncatedBody, kw_only=True):
    """The body of a request for vectors."""

    inputs: str | list[int | str | list[int]]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None


class AllInputsBody(TruncatedBody, kw_only=True):
    """The body of a request for something of each token."""

    inputs: str | list[int | str | list[int]]
    prompt_name: str | None = None


class SparseInputsBody(AllInputsBody, kw_only=True):
    """The body of a request for the tokens of the vocabulary that a text's sparse vector has."""


class PredictBody(TruncatedBody, kw_only=True):
    """The body of a request for labels of a text, of a pair of texts, or of a list of lists of one text or two."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False


class RankedTextsBody(RerankBody, kw_only=True):
    """The body of a request to rank texts; with ``documents`` in place of ``texts``, that of `/v1/rerank`."""

    documents: list[str | Document] = []
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"


class Sentences(msgspec.Struct, kw_only=True):
    """A text and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityBody(msgspec.Struct, kw_only=True):
    """The body of a request for similarities."""

    inputs: Sentences
    parameters: dict[str, Any] = {}


async def _choices(
    services: ModelServices, request: Request, body: EmbedInputsBody | AllInputsBody, task: Task
) -> list[GeneratedChoice]:
    if body.prompt_name is not None:
        raise UnsupportedParameter("prompt_name")
    return await body.call(services, request).ask(task, prompts_of(body.inputs, "inputs"), "inputs")


async def embed(request: Request) -> Response:
    services, body, headers = await read(request, embed_decoder)
    info = services.engine.info
    check_dimensions(body.dimensions, info.embedding_size, info.pooling)
    choices = await _choices(services, request, body, "embed")
    how: dict[str, Any] = {"normalizes": body.normalize, "dimensions": body.dimensions}
    return await asyncio.to_thread(
        lambda: json_response([numbers(services, choice, **how).tolist() for choice in choices], headers)
    )


async def embed_all(request: Request) -> Response:
    services, body, headers = await read(request, all_decoder)
    choices = await _choices(services, request, body, "token_embed")
    return await asyncio.to_thread(
        lambda: json_response([numbers(services, choice, normalizes=False).tolist() for choice in choices], headers)
    )


async def embed_sparse(request: Request) -> Response:
    services, body, headers = await read(request, sparse_decoder)
    if not services.engine.info.pooling.is_sparse:
        raise InvalidParameter("inputs", "This model has no sparse vectors: they need a pooling_type of splade.")
    choices = await _choices(services, request, body, "embed")

    def rows(choice: GeneratedChoice) -> list[dict[str, Any]]:
        vector = numbers(services, choice)
        found = vector.nonzero()[0]
        pairs = zip(found.tolist(), vector[found].tolist(), strict=True)
        return [{"index": index, "value": value} for index, value in pairs]

    return await asyncio.to_thread(lambda: json_response([rows(choice) for choice in choices], headers))


async def predict(request: Request) -> Response:
    services, body, headers = await read(request, predict_decoder)
    given = body.inputs
    is_batch = isinstance(given, list) and any(isinstance(item, list) for item in given)
    texts: list[Any] = list(given) if is_batch else [given]
    sources: list[PromptSource] = [_one_or_two(text) for text in texts]
    choices = await body.call(services, request).ask("classify", sources, "inputs")
    names = services.engine.info.pooling.labels
    answers = []
    for choice in choices:
        values = numbers(services, choice, is_raw=body.raw_scores).tolist()
        rows = [{"score": score, "label": name} for score, name in zip(values, names, strict=True)]
        answers.append(sorted(rows, key=lambda row: -row["score"]))
    return json_response(answers if is_batch else answers[0], headers)


def _one_or_two(texts: Any) -> PromptSource:
    texts = [texts] if isinstance(texts, str) else texts
    if len(texts) not in (1, 2) or not all(isinstance(text, str) for text in texts):
        message = "'inputs' must be a text, a pair of texts, or a list of lists of one text or two."
        raise InvalidParameter("inputs", message)
    return str(texts[0]) if len(texts) == 1 else (str(texts[0]), str(texts[1]))


async def rerank(request: Request) -> Response:
    services, body, headers = await read(request, rank_decoder)
    if body.texts is None:
        return await rerank_documents(services, body, headers, request)
    if not body.texts:
        raise InvalidParameter("texts", "'texts' must not be empty.")
    call = _call(services, request, body.truncate, SIDES[body.truncation_direction])
    found, _ = await call.scores(pairs_of(body.query, body.texts), ("query", "texts"), body.raw_scores)
    order = sorted(range(len(found)), key=lambda i: (-found[i], i))
    shown = [{"index": i, "score": found[i]} | ({"text": body.texts[i]} if body.return_text else {}) for i in order]
    return json_response(shown, headers)


async def similarity(request: Request) -> Response:
    services, body, headers = await read(request, similarity_decoder)
    if unknown := set(body.parameters) - {"truncate", "truncation_direction"}:
        raise UnsupportedParameter(f"parameters.{min(unknown)}")
    call = _call(services, request, body.parameters.get("truncate"), None)
    if not body.inputs.sentences:
        raise InvalidParameter("inputs.sentences", "'inputs.sentences' must not be empty.")
    pairs = pairs_of(body.inputs.source_sentence, body.inputs.sentences)
    found, _ = await call.scores(pairs, ("inputs", "inputs"))
    return json_response(found, headers)


def description(services: ModelServices) -> dict[str, Any]:
    """What TEI's `/info` says of a model that generates nothing."""
    info, settings = services.engine.info, services.config
    labels = {str(i): name for i, name in enumerate(info.pooling.labels)}
    kind: dict[str, Any] = {"embedding": {"pooling": settings.model.pooling_type}}
    if labels:
        ids = {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}
        kind = {"reranker" if "score" in info.tasks else "classifier": ids}
    return {
        "model_id": services.model_name,
        "model_sha": None,
        "model_dtype": info.dtype,
        "model_type": kind,
        "max_concurrent_requests": info.max_num_seqs + settings.server.max_num_queued_reqs,
        "max_input_length": info.max_model_len,
        "max_batch_tokens": info.max_num_batched_tokens,
        "max_batch_requests": info.max_num_seqs,
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": version(),
    }


embed_decoder = BodyDecoder(EmbedInputsBody)
all_decoder = BodyDecoder(AllInputsBody)
sparse_decoder = BodyDecoder(SparseInputsBody)
predict_decoder = BodyDecoder(PredictBody)
rank_decoder = BodyDecoder(RankedTextsBody)
similarity_decoder = BodyDecoder(SimilarityBody)
_posted = functools.partial(Endpoint, "POST", errors=ERRORS)
ENDPOINTS = [
    _posted("/embed", embed, "Turn texts into vectors, as TEI does", EmbedInputsBody, "tei_embed"),
    _posted("/embed_all", embed_all, "Turn all tokens into vectors, as TEI does", AllInputsBody),
    _posted("/embed_sparse", embed_sparse, "Turn texts into sparse vectors, as TEI does", SparseInputsBody),
    _posted("/predict", predict, "Scores of labels, the best first, as TEI gives them", PredictBody),
    _posted(
        *("/rerank", rerank),
        "Put texts in the order in which they suit a query, as TEI does, or documents as `/v1/rerank` does",
        *(RankedTextsBody, "tei_rerank"),
    ),
    _posted("/similarity", similarity, "Compare a text with others, as TEI does", SimilarityBody),
]
