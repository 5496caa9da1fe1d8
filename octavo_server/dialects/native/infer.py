"""POST /infer/v1/completions: always streamed, with one event per token and a final event."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from octavo.errors import ContextLengthExceeded, InvalidParameter, ModelNotFound, QueueFull, RequestError
from octavo_server.dialects.openai.answer_parts import usage
from octavo_server.dialects.openai.common_fields import sampling
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.generation import GeneratedChoice
from octavo_server.http.error_responses import UnknownParameter
from octavo_server.http.request_body import BodyDecoder, MalformedJSON
from octavo_server.http.response import EventStream, encode_line
from octavo_server.pipeline import Answer, Dialect, Submission
from octavo_server.services import ModelServices


class InferBody(msgspec.Struct, kw_only=True):
    """The body of a completion request for text or token ids."""

    model: str
    prompt: str | list[int]
    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float = 1.0
    stream: bool = True
    """Ignored: the response is always streamed."""
    stop: str | list[str] = []
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    timeout: float | None = None


class EmptyPrompt(InvalidParameter):
    """The prompt is empty."""


class StrictDecoder(BodyDecoder[InferBody]):
    """Refuses unknown fields, whatever the setting."""

    def read(self, body: bytes, max_model_len: int = 0) -> tuple[InferBody, list[str]]:
        """The value. Raises ``RequestError``."""
        value, unknown = super().read(body, max_model_len)
        if unknown:
            raise UnknownParameter(unknown)
        return value, []


async def _translate(body: InferBody, services: ModelServices, request: Request) -> Submission:
    if not body.prompt:
        raise EmptyPrompt("prompt", "'prompt' must not be empty.")
    if body.max_tokens < 1:
        raise InvalidParameter("max_tokens", "'max_tokens' must be at least 1.")
    if body.top_k is not None and body.top_k < 1:
        raise InvalidParameter("top_k", "'top_k' must be at least 1.")
    completion = CompletionBody(
        model=body.model,
        prompt=body.prompt if isinstance(body.prompt, str) else list(body.prompt),
        max_tokens=body.max_tokens,
        sampling=sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k is None else body.top_k,
            repetition_penalty=body.repetition_penalty,
            seed=body.seed,
        ),
        stop=body.stop,
        timeout=body.timeout,
        **_constraint(body.response_format),
    )
    return Submission(
        request=client_request(completion, services, request),
        answer=lambda generation: InferEvents(),
        is_streamed=True,
        stream=InferStream,
    )


_STATUSES: dict[type[RequestError], int] = {
    EmptyPrompt: 400,
    InvalidParameter: 422,
    ContextLengthExceeded: 422,
    ModelNotFound: 422,
    MalformedJSON: 422,
    QueueFull: 503,
}


def _constraint(given: dict[str, Any] | None) -> dict[str, Any]:
    """``response_format`` as fields of a completion body. Raises ``InvalidParameter``."""
    if given is None:
        return {}
    if given.get("type") == "json_schema" and isinstance(given.get("schema"), dict):
        return {"structured_outputs": {"json": given["schema"]}}
    if given.get("type") == "json_schema" and isinstance(given.get("json_schema"), dict):
        return {"response_format": given}
    if given.get("type") == "regex" and isinstance(given.get("pattern"), str):
        return {"structured_outputs": {"regex": given["pattern"]}}
    message = "'response_format' must be of type 'json_schema' with a 'schema', or 'regex' with a 'pattern'."
    raise InvalidParameter("response_format", message)


class InferEvents(Answer):
    """Renders the events of one choice."""

    def frames(self, choice: GeneratedChoice) -> bytes:
        """One event per token; text that several tokens produce together is in the last one's."""
        update = choice.take()
        texts = [*[""] * (len(update.tokens) - 1), update.text]
        data = b"".join(
            _event("token", {"token": text, "token_id": token})
            for text, token in zip(texts, update.tokens, strict=False)
        )
        if choice.finish_reason is not None:
            is_end = choice.finish_reason == "stop" and choice.stop_reason is None
            counts = usage([choice])
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            end = {
                "finish_reason": "eos" if is_end else choice.finish_reason,
                "usage": {name: counts[name] for name in names},
            }
            data += _event("done", end)
        return data


class InferStream(EventStream):
    """Named events; the last one is ``done`` or ``error``."""

    END = b""

    def error_frames(self, error: RequestError) -> bytes:
        return _event("error", {"error": error.message})


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_line(data))


INFER = Dialect(StrictDecoder(InferBody), _translate, statuses=_STATUSES)
ENDPOINTS = [
    INFER.endpoint("/infer/v1/completions", "Continue text or token ids, an event for each token", "infer"),
]
