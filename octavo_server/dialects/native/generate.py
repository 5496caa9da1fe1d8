"""POST /v1/generate and POST /generate: minimal text completion; the latter also in the forms of SGLang and TGI."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.errors import ContextLengthExceeded, InvalidParameter, QueueFull
from octavo_server.dialects.native.sglang import REFUSED, SglangFields, submission
from octavo_server.dialects.native.tgi import Parameters, TGIBody, continuation
from octavo_server.dialects.openai.common_fields import sampling
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http.error_responses import MissingParameter
from octavo_server.http.request_body import BodyDecoder, MalformedJSON
from octavo_server.pipeline import Answer, Dialect, Submission
from octavo_server.services import ModelServices

MAX_PROMPT_CHARACTERS = 8000
MAX_NEW_TOKENS = 512
STOPPED = "Sequences generated EOS token."


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of a request for exactly ``max_new_tokens`` tokens; end-of-text is ignored."""

    prompt: str
    max_new_tokens: int = 64
    temperature: float = 0.0
    timeout: float | None = None
    return_token_ids: bool = False


class PlainBody(SglangFields, kw_only=True):
    """The body of a request for at most ``max_tokens`` tokens, of one in SGLang's form, with ``text`` or ``input_ids``,
    or of one in TGI's, with ``inputs``."""

    prompt: str | None = None
    max_tokens: int | None = None
    inputs: str | None = None
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    temperature: float = 0.0
    return_token_ids: bool = False


async def _exactly(body: GenerateBody, services: ModelServices, request: Request) -> Submission:
    if not 1 <= len(body.prompt) <= MAX_PROMPT_CHARACTERS:
        raise InvalidParameter("prompt", f"'prompt' must have 1 to {MAX_PROMPT_CHARACTERS} characters.")
    if not 1 <= body.max_new_tokens <= MAX_NEW_TOKENS:
        raise InvalidParameter("max_new_tokens", f"'max_new_tokens' must be from 1 to {MAX_NEW_TOKENS}.")
    completion = CompletionBody(
        prompt=body.prompt,
        max_tokens=body.max_new_tokens,
        sampling=sampling(ignore_eos=True, temperature=body.temperature),
        timeout=body.timeout,
        return_token_ids=body.return_token_ids,
    )

    def shown(choice: GeneratedChoice) -> dict[str, Any]:
        return {
            "request_id": str(uuid.uuid4()),
            "text": choice.take().text,
            "generated_tokens": choice.num_tokens,
            "latency_ms": round((time.monotonic() - request.state.started) * 1000, 3),
            "finish_reason": choice.finish_reason,
            "model": services.model_name,
            **choice.ids,
        }

    return _submission(completion, services, request, shown)


async def _of_any_form(body: PlainBody, services: ModelServices, request: Request) -> Submission:
    if body.prompt is not None:
        return _at_most(body, body.prompt, services, request)
    if body.inputs is not None:
        asked = TGIBody(inputs=body.inputs, parameters=body.parameters, stream=body.stream, timeout=body.timeout)
        return continuation(asked, services, request, is_list=False)
    if body.text is not None or body.input_ids is not None:
        return submission(body, services, request)
    raise MissingParameter("prompt")


def _of_other_forms(body: PlainBody, services: ModelServices) -> list[str]:
    """Fields that are of another form than the body's."""
    if body.prompt is not None:
        own = _OF_PROMPT
    else:
        own = SglangFields.__struct_fields__ if body.inputs is None else TGIBody.__struct_fields__
    others = [name for name in PlainBody.__struct_fields__ if name not in own]
    return [name for name in others if getattr(body, name) != getattr(_NOTHING, name)]


def _at_most(body: PlainBody, prompt: str, services: ModelServices, request: Request) -> Submission:
    if body.max_tokens is None:
        raise MissingParameter("max_tokens")
    if not prompt.strip():
        raise BadValue("prompt", "'prompt' must not be empty.")
    if body.max_tokens < 1:
        raise BadValue("max_tokens", "'max_tokens' is below 1.")
    completion = CompletionBody(
        prompt=prompt,
        max_tokens=body.max_tokens,
        sampling=sampling(temperature=body.temperature),
        timeout=body.timeout,
        return_token_ids=body.return_token_ids,
    )

    def shown(choice: GeneratedChoice) -> dict[str, Any]:
        is_cut = choice.finish_reason == "length"
        return {
            "request_id": str(uuid.uuid4()),
            "prompt": prompt,
            "generated_text": prompt + choice.take().text,
            "token_count": choice.num_tokens,
            "stop_reason": f"Reached max_tokens limit of {body.max_tokens}." if is_cut else STOPPED,
            **choice.ids,
        }

    return _submission(completion, services, request, shown)


class BadValue(InvalidParameter):
    """A value of the right type that is out of range."""


class PlainAnswer(Answer):
    """Shows one choice as a JSON object; there are no streams."""

    def __init__(self, shown: Callable[[GeneratedChoice], dict[str, Any]]) -> None:
        self._shown = shown

    def unstreamed(self, choices: list[GeneratedChoice]) -> object:
        return self._shown(choices[0])


def _submission(
    body: CompletionBody, services: ModelServices, request: Request, shown: Callable[[GeneratedChoice], dict[str, Any]]
) -> Submission:
    def answer(generation: Generation) -> PlainAnswer:
        if body.return_token_ids:
            generation.choices[0].output_tokens = []
        return PlainAnswer(shown)

    return Submission(request=client_request(body, services, request), answer=answer, is_streamed=False)


_STATUSES: dict[Any, int] = {BadValue: 400, ContextLengthExceeded: 400, InvalidParameter: 422, MalformedJSON: 422}

GENERATE = Dialect(BodyDecoder(GenerateBody), _exactly, statuses=_STATUSES)
_NOTHING = PlainBody()
_OF_PROMPT: tuple[str, ...] = ("prompt", "max_tokens", "temperature", "timeout", "return_token_ids")
_PLAIN_STATUSES = {**_STATUSES, QueueFull: 503}
PLAIN = Dialect(BodyDecoder(PlainBody, REFUSED), _of_any_form, _of_other_forms, statuses=_PLAIN_STATUSES)
ENDPOINTS = [
    GENERATE.endpoint(
        "/v1/generate",
        f"Continue a text of at most {MAX_PROMPT_CHARACTERS:,} characters by exactly 1 to {MAX_NEW_TOKENS} tokens",
        "generate",
    ),
    PLAIN.endpoint("/generate", "Continue a text, also as SGLang and TGI do", "generate_plainly"),
]
