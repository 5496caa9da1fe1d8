"""POST /api/chat and /api/generate: Ollama's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.text.message_parser import Piece, Text
from octavo.types import TokenLogprobs
from octavo_server.admission import ClientRequest
from octavo_server.dialects.chat_reply import ChatReply, FieldNames, submission
from octavo_server.dialects.ollama.answer import ERRORS, LineStream, OllamaAnswer, as_message, as_response, now
from octavo_server.dialects.ollama.body import (
    NAMES,
    CommonBody,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_body,
    chat_decoder,
    generate_chat_body,
    generate_decoder,
    generation_fields,
    served_name,
    without_effect,
)
from octavo_server.dialects.openai import completions
from octavo_server.dialects.openai.answer_parts import TokenNames
from octavo_server.dialects.openai.common_fields import NO_LIMIT
from octavo_server.generation import GeneratedChoice
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.response import json_response
from octavo_server.pipeline import Dialect, Submission
from octavo_server.services import ModelServices


async def _translate_chat(body: OllamaChatBody, services: ModelServices, request: Request) -> Submission | Response:
    if not body.messages:
        return await _loaded(body, services, as_message({"content": ""}))
    names = TokenNames(services.tokenizer, as_ids=False)

    def answer(reply: ChatReply) -> OllamaAnswer:
        return OllamaAnswer(reply.pieces, reply.logprobs, body, names, as_message, request.state.started)

    return submission(services, chat_body(body, services), request, answer, LineStream, FieldNames(NAMES))


async def _translate_generate(
    body: OllamaGenerateBody, services: ModelServices, request: Request
) -> Submission | Response:
    if not body.prompt and not body.images:
        return await _loaded(body, services, as_response({"content": ""}))

    names = TokenNames(services.tokenizer, as_ids=False)

    def answer(pieces: Callable[[], list[Piece]], logprobs: list[TokenLogprobs]) -> OllamaAnswer:
        return OllamaAnswer(pieces, logprobs, body, names, as_response, request.state.started)

    if body.raw or services.chat_template.source is None:
        if body.images:
            raise UnsupportedParameter("images", "'images' need a chat template, and no 'raw'.")
        in_words = FieldNames({**NAMES, "logprobs": "top_logprobs"}).in_errors
        with in_words():
            continuation = _continuation(body, services, request)
        return Submission(
            request=continuation,
            answer=lambda generation: answer(*_plain_pieces(generation.choices[0], body.return_token_ids)),
            is_streamed=body.stream,
            stream=LineStream,
            is_large=body.logprobs,
            in_words=in_words,
        )
    chat = generate_chat_body(body, services)
    places = ["system", "prompt"][-len(chat.messages) :]
    own = FieldNames({**NAMES, "messages": "prompt"}, {"messages": places}, {".content": ""})
    return submission(services, chat, request, lambda reply: answer(reply.pieces, reply.logprobs), LineStream, own)


def _continuation(body: OllamaGenerateBody, services: ModelServices, request: Request) -> ClientRequest:
    fields = {"max_tokens": NO_LIMIT, **generation_fields(body, services), "prompt": body.prompt}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs
    completion = msgspec.convert(fields, type=completions.CompletionBody)
    return completions.client_request(completion, services, request)


def _plain_pieces(choice: GeneratedChoice, shows_ids: bool) -> tuple[Callable[[], list[Piece]], list[TokenLogprobs]]:
    """A function that returns the choice's new text as pieces, and where it leaves the log-probabilities of that."""
    left: list[TokenLogprobs] = []
    if shows_ids:
        choice.output_tokens = []

    def pieces() -> list[Piece]:
        text, _, logprobs = choice.take()
        left.extend(logprobs)
        return [Text("content", text)] if text else []

    return pieces, left


async def _loaded(body: CommonBody, services: ModelServices, nothing: dict[str, Any]) -> Response:
    """The answer to a request without a prompt, which only asks for the model to be loaded."""
    services.check_model(served_name(body.model, services))
    await services.engine.wake_up()
    return json_response({"model": body.model, "created_at": now(), **nothing, "done": True, "done_reason": "load"}, {})


CHAT = Dialect(chat_decoder, _translate_chat, without_effect)
GENERATE = Dialect(generate_decoder, _translate_generate, without_effect)
ENDPOINTS = [
    CHAT.endpoint("/api/chat", "Answer a conversation, as Ollama does", "chat", ERRORS),
    GENERATE.endpoint("/api/generate", "Answer or continue a text, as Ollama does", "generate", ERRORS),
]
