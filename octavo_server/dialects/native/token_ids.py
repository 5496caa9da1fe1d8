"""POST /inference/v1/generate: token ids in, token ids out, as vLLM has it for trainers and for routers that tokenise.

Sampling parameters are those of completions, in ``sampling_params``. A choice has the ids that were generated, and with
``logprobs`` their log-probabilities by id; with ``output_mode`` "text" also its text. ``weight_versions`` says which
weights computed which of its tokens. A request that ends because the server is paused, or because its id was named in
POST /inference/v1/abort_requests, is answered with what it has by then, and the reason "abort".

https://docs.vllm.ai/en/latest/serving/online_serving/token_in_token_out/
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.types import TokenLogprobs
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.dialects.openai.completions import decoder as completion_decoder
from octavo_server.dialects.openai.fields import NO_LIMIT, default_max_tokens
from octavo_server.dialects.openai.rendering import TokenNames, chat_logprobs, finite, prompt_logprobs, usage
from octavo_server.generation import ChoiceUpdate, GeneratedChoice, Generation
from octavo_server.http.body_decoder import BodyDecoder
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.sse import encode_line, json_response
from octavo_server.pipeline import Dialect, Submission
from octavo_server.services import ModelServices, server_of
from octavo_server.tenants.api_keys import caller_of

OWN_FIELDS = frozenset(("echo", "model", "prompt", "stream", "stream_options", "use_beam_search"))
"""Fields of a completion that are not sampling parameters."""
MODES = ("tokens", "text")
MAX_REQUEST_ID = 256


class TokenIdsBody(msgspec.Struct, kw_only=True):
    """The body of a request to continue token ids."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str = ""
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    output_mode: str = "tokens"


class AbortBody(msgspec.Struct, kw_only=True):
    """The body of a request to end others."""

    request_ids: list[str]


async def _translate(body: TokenIdsBody, services: ModelServices, request: Request) -> Submission:
    foreign = sorted(OWN_FIELDS & body.sampling_params.keys())
    if foreign:
        raise InvalidParameter("sampling_params", f"'{foreign[0]}' is no sampling parameter.")
    if body.output_mode not in MODES:
        raise InvalidParameter("output_mode", f"'output_mode' must be one of {', '.join(MODES)}.")
    if body.output_mode == "text":
        services.need_tokenizer("output_mode")
    if not 1 <= len(body.request_id or "-") <= MAX_REQUEST_ID:
        raise InvalidParameter("request_id", f"'request_id' must have 1 to {MAX_REQUEST_ID} characters.")
    own = {
        name: getattr(body, name)
        for name in ("model", "priority", "cache_salt", "session_id", "stream", "stream_options")
        if getattr(body, name) is not None
    }
    fields = {"max_tokens": NO_LIMIT, **body.sampling_params, **own, "prompt": body.token_ids}
    completion, ignored = completion_decoder.read(msgspec.json.encode(fields), services.engine.info.max_model_len)
    services.report(request, [f"sampling_params.{name}" for name in ignored])
    submitted = client_request(completion, services, request)
    if body.sampling_params.get("max_tokens") is None:
        submitted = dataclasses.replace(submitted, default_max_tokens=default_max_tokens(services, None))

    def answer(generation: Generation) -> TokenIdsAnswer:
        generation.keeps_aborted = True
        made = TokenIdsAnswer(services, body, completion, generation)
        services.server.abortable[caller_of(request).name, made.request_id] = generation
        return made

    return Submission(
        request=submitted,
        answer=answer,
        is_streamed=body.stream,
        is_large=completion.logprobs is not None or completion.prompt_logprobs is not None,
    )


class TokenIdsAnswer:
    """Renders the choices, unstreamed or as events."""

    id = ""

    def __init__(
        self, services: ModelServices, body: TokenIdsBody, completion: CompletionBody, generation: Generation
    ) -> None:
        self.request_id = body.request_id or uuid.uuid4().hex
        self._services = services
        self._body = body
        self._completion = completion
        self._choices = generation.choices
        self._names = TokenNames(services.tokenizer, as_ids=body.output_mode == "tokens")
        self._unopened = set(range(len(self._choices)))

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        """The answer, once its choices are finished."""
        result: dict[str, Any] = {
            **self._head(choices[0], is_first=True),
            "model": self._services.answering_name(self._body.model),
            "created": int(time.time()),
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage(choices),
            "weight_version": choices[0].weight_versions[-1][0],
        }
        if self._completion.prompt_logprobs is not None:
            found = choices[0].prompt_logprobs
            result["prompt_logprobs"] = prompt_logprobs(found, self._names, self._completion.prompt_logprobs)
        return result

    def frames(self, choice: GeneratedChoice) -> bytes:
        """The event of a choice's new output."""
        is_first = choice.index in self._unopened
        self._unopened.discard(choice.index)
        shown = self._choice(choice)
        if not (shown["token_ids"] or shown.get("text") or choice.finish_reason):
            return b""
        counts = usage(self._choices) if self._completion.has_continuous_usage else None
        return _event({**self._head(choice, is_first), "choices": [shown], "usage": counts})

    def last_frames(self) -> bytes:
        if not self._completion.includes_usage:
            return b""
        return _event({**self._head(self._choices[0], False), "choices": [], "usage": usage(self._choices)})

    def _head(self, choice: GeneratedChoice, is_first: bool) -> dict[str, Any]:
        ids = {"prompt_token_ids": choice.prompt.tokens} if self._body.return_token_ids and is_first else {}
        return {"request_id": self.request_id, "output_mode": self._body.output_mode, **ids}

    def _choice(self, choice: GeneratedChoice) -> dict[str, Any]:
        """The output of a choice since the last call, with the weights of all of it at the end."""
        update = choice.take()
        text = {"text": update.text} if self._body.output_mode == "text" else {}
        return {
            "index": choice.index,
            **text,
            "token_ids": update.tokens,
            "logprobs": self._logprobs(update),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "weight_versions": None if choice.finish_reason is None else spans(choice),
        }

    def _logprobs(self, update: ChoiceUpdate) -> dict[str, Any] | None:
        num_top = self._completion.logprobs
        if num_top is None:
            return None
        if self._body.output_mode == "text":
            return chat_logprobs(update.logprobs, self._names, num_top)
        return {"content": [_entry(each, self._names, num_top) for each in update.logprobs]}


def spans(choice: GeneratedChoice) -> list[dict[str, Any]]:
    """Which weights computed which of the output tokens; none if there are no tokens."""
    starts = [*(start for _, start in choice.weight_versions), choice.num_tokens]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(choice.weight_versions, starts[1:], strict=True)
        if start < end
    ]


def _entry(entry: TokenLogprobs, names: TokenNames, num_top: int) -> dict[str, Any]:
    """The log-probability of a token, and ``num_top`` in all: its own, then those of the most likely other tokens."""
    own = entry.token_id, finite(entry.logprob), entry.rank
    others = [
        (token, finite(logprob), rank)
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        if token != entry.token_id
    ]
    return {**_named(own, names), "top_logprobs": [_named(each, names) for each in [own, *others][:num_top]]}


def _named(candidate: tuple[int, float, int], names: TokenNames) -> dict[str, Any]:
    token, logprob, rank = candidate
    return {"token": names.name(token), "token_id": token, "logprob": logprob, "rank": rank}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_line(value) + b"\n\n"


async def abort_by_id(request: Request) -> Response:
    """Ids that are not running, or of other API keys, are passed over."""
    server = server_of(request)
    _, body, headers = await server.read(request, abort_decoder)
    return json_response({"status": "ok", "aborted": server.abort(request, body.request_ids)}, headers)


_IGNORED: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "reasoning_ended": (True,),
    "reasoning_parser_kwargs": (),
}
"""About other servers, and about where a grammar begins, which the grammars of ``/render`` say themselves."""
_decoder = BodyDecoder(
    TokenIdsBody, {"features": (), "content_parts": ()}, frozenset(("token_offsets", "assistant_tokens_mask")), _IGNORED
)
abort_decoder = BodyDecoder(AbortBody, {}, frozenset())
TOKEN_IDS = Dialect(_decoder, _translate)
ENDPOINTS = [
    Endpoint(
        "POST",
        "/inference/v1/generate",
        TOKEN_IDS.serve,
        "Continue token ids by token ids, as trainers do",
        TokenIdsBody,
        name="generate_tokens",
    ),
    Endpoint(
        "POST",
        "/inference/v1/abort_requests",
        abort_by_id,
        "End requests for token ids, with what they have",
        AbortBody,
    ),
]
