"""The Gemini API: contents, counts of tokens, vectors and models. ``v1`` is the same as ``v1beta``.

https://ai.google.dev/api
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.text.embedding_vectors import check_dimensions
from octavo.text.message_parser import Call, Piece, Text
from octavo.text.message_pieces import joined
from octavo.text.tool_calls.tool_format import long_id
from octavo.types import TokenLogprobs
from octavo_server.dialects.chat_reply import ChatReply, FieldNames, members_of, num_prompt_tokens, submission
from octavo_server.dialects.gemini import body as bodies
from octavo_server.dialects.openai.answer_parts import TokenNames, finite, ranked, usage
from octavo_server.dialects.openai.embeddings import EmbeddingBody
from octavo_server.generation import GeneratedChoice
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import TEXT, ErrorForm, object_of
from octavo_server.http.response import EventStream, encode, encode_line, json_response
from octavo_server.pipeline import Answer, Dialect, Submission
from octavo_server.pooling_requests import num_tokens, numbers, read
from octavo_server.services import ModelServices, server_of

MODEL = "/v1beta/models/{model:path}"  # names may contain slashes
FINISH_REASONS = {"stop": "STOP", "length": "MAX_TOKENS"}
_REFUSALS = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}
_STATUSES = {**_REFUSALS, 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
"""https://cloud.google.com/apis/design/errors"""


def gemini_error(error: RequestError) -> dict[str, Any]:
    """The body of an error response; the name of the status is derived from its number."""
    status = _STATUSES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    told: dict[str, Any] = {"code": error.status, "message": error.message, "status": status}
    if error.param is not None and error.status == 400:
        violations = [{"field": error.param, "description": error.message}]
        told["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}]
    return {"error": told}


_SCHEMA = object_of(error=object_of(code={"type": "integer"}, message=TEXT, status=TEXT))
ERRORS = ErrorForm("GeminiError", _SCHEMA, gemini_error, ("/v1beta",))


@dataclass
class ContentAnswer(Answer):
    """Renders the candidates of one request."""

    replies: Sequence[ChatReply]
    model: str
    names: TokenNames
    num_top: int | None
    """Number of log-probabilities of each position; ``None``: there are none at all."""
    shows_thoughts: bool
    is_list: bool
    """Whether a stream is a JSON list, or one of events."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    start: bytes = b"["
    """What stands before the next element of a list."""

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        """The whole answer, once its choices are finished."""
        return self._response([self._candidate(reply) for reply in self.replies])

    def frames(self, choice: GeneratedChoice) -> bytes:
        """A response with a candidate's new parts, if there are any or it has ended."""
        candidate = self._candidate(self.replies[choice.index])
        return self._frame(self._response([candidate])) if candidate["content"]["parts"] else b""

    def last_frames(self) -> bytes:
        return b"]" if self.is_list else b""

    def failure(self, error: RequestError) -> bytes:
        """The end of a stream that fails: clients look for the error on a line that is no event, or in an event."""
        told = self._frame(gemini_error(error))
        return told + b"]" if self.is_list else told.removeprefix(b"data: ") + told

    def _frame(self, value: dict[str, Any]) -> bytes:
        """An element of a stream."""
        if not self.is_list:
            return b"data: " + encode_line(value) + b"\n\n"
        start, self.start = self.start, b",\n"
        return start + encode(value)

    def _response(self, candidates: list[dict[str, Any]]) -> dict[str, Any]:
        counts = usage([reply.choice for reply in self.replies])
        thoughts = counts["completion_tokens_details"]["reasoning_tokens"]
        told = {
            "promptTokenCount": counts["prompt_tokens"],
            "cachedContentTokenCount": counts["prompt_tokens_details"]["cached_tokens"],
            "candidatesTokenCount": counts["completion_tokens"] - thoughts,
            "thoughtsTokenCount": thoughts,
            "totalTokenCount": counts["total_tokens"],
        }
        return {"candidates": candidates, "usageMetadata": told, "modelVersion": self.model, "responseId": self.id}

    def _candidate(self, reply: ChatReply) -> dict[str, Any]:
        """What is new of a candidate."""
        parts = [part for piece in joined(reply.pieces()) if (part := self._part(piece))]
        choice, entries = reply.choice, reply.logprobs
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": choice.index}
        if choice.finish_reason is not None:
            # Clients leave a turn out of the history of a chat if it has a content without parts.
            parts += [] if parts else [{"text": ""}]
            candidate["finishReason"] = FINISH_REASONS.get(choice.finish_reason, "OTHER")
        if parts and self.num_top is not None:
            candidate["logprobsResult"] = self._logprobs(entries)
            if entries and len(entries) == choice.num_tokens:
                candidate["avgLogprobs"] = sum(finite(entry.logprob) for entry in entries) / len(entries)
            entries.clear()
        return candidate

    def _part(self, piece: Piece) -> dict[str, Any]:
        """A piece as a part; empty if it is not shown. Calls come whole in this API."""
        if isinstance(piece, Call):
            return {"functionCall": {"id": long_id(), "name": piece.name, "args": members_of(piece)}}
        if not isinstance(piece, Text) or (piece.kind == "reasoning" and not self.shows_thoughts):
            return {}
        return {"text": piece.text, "thought": True} if piece.kind == "reasoning" else {"text": piece.text}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        def shown(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.names.name(token), "tokenId": token, "logProbability": finite(logprob)}

        tops = ([shown(*pair) for pair in ranked(entry)[: self.num_top]] for entry in entries)
        chosen = [shown(entry.token_id, entry.logprob) for entry in entries]
        return {"chosenCandidates": chosen, "topCandidates": [{"candidates": top} for top in tops]}


class ContentStream(EventStream):
    """Nothing is sent in silence: clients read every line."""

    KEEP_ALIVE = b""
    END = b""

    def error_frames(self, error: RequestError) -> bytes:
        assert isinstance(self.writer, ContentAnswer)
        return self.writer.failure(error)


class ContentList(ContentStream):
    """A JSON list."""

    CONTENT_HEADERS = {"Content-Type": "application/json"}


async def _translate(
    body: bodies.GenerateContentBody, services: ModelServices, request: Request, is_streamed: bool = False
) -> Submission:
    model, config = request.path_params["model"], body.config
    chat, words, left_out = bodies.translated(body, services, model, is_streamed)
    services.report(request, left_out)
    is_list = request.query_params.get("alt") != "sse"

    def answer(reply: ChatReply) -> ContentAnswer:
        others = (ChatReply(services, chat, reply.generation, index) for index in range(1, chat.n))
        num_top = (config.logprobs or 0) if config.response_logprobs else None
        names = TokenNames(services.tokenizer, as_ids=False)
        shown = services.answering_name(model), names, num_top, config.include_thoughts, is_list
        return ContentAnswer([reply, *others], *shown)

    return submission(services, chat, request, answer, ContentList if is_list else ContentStream, words)


async def count_content_tokens(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, bodies.count_decoder)
    model = request.path_params["model"]
    services.check_model(model)
    given, whole = body.generateContentRequest, bodies.GenerateContentBody
    asked = body if given is None else bodies.converted(given, whole, "generateContentRequest")
    chat, words, left_out = bodies.translated(asked, services, model)
    services.report(request, left_out)
    return json_response({"totalTokens": await num_prompt_tokens(services, chat, request, words)}, headers)


async def embed_content(request: Request) -> Response:
    services, body, headers = await read(request, bodies.embed_decoder)
    (vector,), counts = await _vectors(request, services, {"content": body})
    return json_response({"embedding": vector, "usageMetadata": counts}, headers)


async def embed_contents(request: Request) -> Response:
    services, body, headers = await read(request, bodies.embed_all_decoder)
    places = {f"requests[{place}]": given for place, given in enumerate(body.requests)}
    contents = {f"{where}.content": bodies.converted(places[where], bodies.EmbedContentBody, where) for where in places}
    names = {bodies.camel(name) for given in body.requests for name in given}
    names -= {*bodies.EmbedContentBody.__struct_fields__, "model"}
    services.report(request, [f"requests.{name}" for name in sorted(names)])
    vectors, counts = await _vectors(request, services, contents)
    return await asyncio.to_thread(json_response, {"embeddings": vectors, "usageMetadata": counts}, headers)


async def _vectors(
    request: Request, services: ModelServices, given: dict[str, bodies.EmbedContentBody]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The vector of the content at each place, and counts of tokens. Raises ``RequestError``."""
    info, sizes = services.engine.info, [body.outputDimensionality for body in given.values()]
    with FieldNames({"dimensions": "outputDimensionality", "input": "content"}).in_errors():
        for size in sizes:
            check_dimensions(size, info.embedding_size, info.pooling)
        texts: list[int | str | list[int]] = [bodies.text_of(body.content, where) for where, body in given.items()]
        asked = EmbeddingBody(model=request.path_params["model"], input=texts)
        choices = await asked.choices(services, request, "embed")
    pairs, count = list(zip(choices, sizes, strict=True)), num_tokens(choices)
    vectors = await asyncio.to_thread(
        lambda: [{"values": numbers(services, choice, dimensions=size).tolist()} for choice, size in pairs]
    )
    return vectors, {"promptTokenCount": count, "totalTokenCount": count}


GENERATE, STREAM = (
    Dialect(bodies.content_decoder, functools.partial(_translate, is_streamed=is_streamed), bodies.without_effect)
    for is_streamed in (False, True)
)
_posted = functools.partial(Endpoint, "POST", errors=ERRORS)
ENDPOINTS = [
    GENERATE.endpoint(f"{MODEL}:generateContent", "Answer contents, as Gemini does", "generate_content", ERRORS),
    STREAM.endpoint(f"{MODEL}:streamGenerateContent", "Answer them in parts", "stream_content", ERRORS),
    _posted(f"{MODEL}:countTokens", count_content_tokens, "Count the tokens of contents", bodies.CountTokensBody),
    _posted(f"{MODEL}:embedContent", embed_content, "Turn a content into a vector", bodies.EmbedContentBody),
    _posted(f"{MODEL}:batchEmbedContents", embed_contents, "Turn contents into vectors", bodies.EmbedContentsBody),
]
