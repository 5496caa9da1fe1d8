"""POST /inference/v1/generate: token ids in, token ids out, as vLLM has it for trainers and for routers that tokenise.

Sampling parameters are those of completions, in ``sampling_params``. A choice has the ids that were generated, and with
``logprobs`` their log-probabilities, each with its id. ``weight_versions`` says which weights computed it, from which
token on: more than one if they were updated meanwhile.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.errors import InvalidParameter
from octavo.types import TokenLogprobs
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.dialects.openai.completions import decoder as completion_decoder
from octavo_server.dialects.openai.rendering import TokenNames, finite, prompt_logprobs, usage
from octavo_server.generation import ChoiceUpdate, GeneratedChoice
from octavo_server.http.body_decoder import BodyDecoder
from octavo_server.http.endpoint import Endpoint
from octavo_server.pipeline import Dialect, Submission
from octavo_server.services import ModelServices

OWN_FIELDS = frozenset(("echo", "model", "prompt", "stream", "stream_options", "use_beam_search"))
"""Fields of a completion that are not sampling parameters."""


class TokenIdsBody(msgspec.Struct, kw_only=True):
    """The body of a request to continue token ids."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str = ""
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None


async def _translate(body: TokenIdsBody, services: ModelServices, request: Request) -> Submission:
    foreign = sorted(OWN_FIELDS & body.sampling_params.keys())
    if foreign:
        raise InvalidParameter("sampling_params", f"'{foreign[0]}' is no sampling parameter.")
    fields = {"prompt": body.token_ids, "model": body.model, "priority": body.priority, **body.sampling_params}
    fields |= {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    fields |= {} if body.session_id is None else {"session_id": body.session_id}
    completion, ignored = completion_decoder.read(msgspec.json.encode(fields), services.engine.info.max_model_len)
    services.report(request, [f"sampling_params.{name}" for name in ignored])
    return Submission(
        request=client_request(completion, services, request),
        answer=lambda generation: TokenIdsAnswer(services, body, completion),
        is_streamed=False,
        is_large=completion.logprobs is not None or completion.prompt_logprobs is not None,
    )


class TokenIdsAnswer:
    """Renders the choices; there are no streams."""

    id = ""

    def __init__(self, services: ModelServices, body: TokenIdsBody, completion: CompletionBody) -> None:
        self._services = services
        self._body = body
        self._completion = completion

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        """The answer, once its choices are finished."""
        names = TokenNames(self._services.tokenizer, as_ids=True)
        taken = [(choice, choice.take()) for choice in choices]
        result: dict[str, Any] = {
            "request_id": self._body.request_id or uuid.uuid4().hex,
            "model": self._services.answering_name(self._body.model),
            "choices": [_choice(choice, update, names, self._completion.logprobs) for choice, update in taken],
            "usage": usage(choices),
            "weight_version": choices[0].weight_versions[-1][0],
        }
        if self._completion.prompt_logprobs is not None:
            found = choices[0].prompt_logprobs
            result["prompt_logprobs"] = prompt_logprobs(found, names, self._completion.prompt_logprobs)
        return result

    def frames(self, choice: GeneratedChoice) -> bytes:
        raise NotImplementedError

    def last_frames(self) -> bytes:
        raise NotImplementedError


def _choice(choice: GeneratedChoice, update: ChoiceUpdate, names: TokenNames, num_top: int | None) -> dict[str, Any]:
    shown = None if num_top is None else {"content": [_entry(each, names, num_top) for each in update.logprobs]}
    return {
        "index": choice.index,
        "token_ids": update.tokens,
        "logprobs": shown,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "weight_versions": [{"version": version, "start": start} for version, start in choice.weight_versions],
    }


def _entry(entry: TokenLogprobs, names: TokenNames, num_top: int) -> dict[str, Any]:
    top = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
    return {
        "token": names.name(entry.token_id),
        "token_id": entry.token_id,
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "top_logprobs": [
            {"token": names.name(token), "token_id": token, "logprob": finite(logprob)} for token, logprob in top
        ],
    }


TOKEN_IDS = Dialect(
    BodyDecoder(TokenIdsBody, {"stream": (), "features": ()}, frozenset(("stream_options",))), _translate
)
ENDPOINTS = [
    Endpoint(
        "POST",
        "/inference/v1/generate",
        TOKEN_IDS.serve,
        "Continue token ids by token ids, as trainers do",
        TokenIdsBody,
        name="generate_tokens",
    )
]
