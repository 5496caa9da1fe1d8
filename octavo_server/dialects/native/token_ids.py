"""POST /inference/v1/generate: token ids in, token ids out, as vLLM has it for trainers and for routers that tokenise.

Sampling parameters are those of completions, in ``sampling_params``. A choice has the ids that were generated, and with
``logprobs`` their log-probabilities by id; with ``output_mode`` "text" also its text. ``weight_versions`` says which
weights computed which of its tokens. A request that ends because the server is paused, or because its id was named in
POST /inference/v1/abort_requests, is answered with what it has by then, and the reason "abort".

https://docs.vllm.ai/en/latest/serving/online_serving/token_in_token_out/
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import io
import time
import uuid
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.runner.route_reading import as_array
from octavo.errors import InvalidParameter
from octavo.model_info import RoutesInfo
from octavo.types import EngineInfo, TokenLogprobs
from octavo_server.admission import ClientRequest
from octavo_server.dialects.openai import kv_transfer
from octavo_server.dialects.openai.answer_parts import TokenNames, chat_logprobs, finite, prompt_logprobs, usage
from octavo_server.dialects.openai.common_fields import NO_LIMIT, default_max_tokens, has_idle_transfer
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.dialects.openai.completions import decoder as completion_decoder
from octavo_server.generation import ChoiceUpdate, GeneratedChoice, Generation
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import encode_line, json_response
from octavo_server.pipeline import Answer, Dialect, Submission
from octavo_server.services import ModelServices, server_of
from octavo_server.tenants.api_keys import caller_of

OWN_FIELDS = frozenset(("echo", "model", "prompt", "stream", "stream_options", "use_beam_search"))
"""Fields of a completion that are not sampling parameters."""
PASSED_ON = (*("model", "priority", "cache_salt", "session_id", "kv_transfer_params", "stream"), "stream_options")
"""Fields that completions have, too."""
ABOUT_EXPERTS = ("return_routed_experts", "routed_experts_prompt_start")
"""Sampling parameters that completions do not have."""
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
    kv_transfer_params: Any = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    output_mode: str = "tokens"
    routed_experts: str | None = None
    """Experts to take at the first positions, in the form of the answer's member of this name."""


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
    own = {name: getattr(body, name) for name in PASSED_ON if getattr(body, name) is not None}
    own |= {"prompt": body.token_ids}
    fields = {"max_tokens": NO_LIMIT, **body.sampling_params, **own}
    about_experts = {name: fields.pop(name) for name in ABOUT_EXPERTS if name in fields}
    completion, ignored = completion_decoder.read(msgspec.json.encode(fields), services.engine.info.max_model_len)
    if "thinking_token_budget" in completion.sampling and not services.message_format.can_reason:
        ignored = [*ignored, "thinking_token_budget"]
    services.report(request, [f"sampling_params.{name}" for name in ignored])
    submitted = client_request(completion, services, request)
    if has_idle_transfer(completion, services):
        services.report(request, [kv_transfer.FIELD])
    if body.sampling_params.get("max_tokens") is None:
        submitted = dataclasses.replace(submitted, default_max_tokens=default_max_tokens(services, None))
    submitted = _with_experts(submitted, body, about_experts, services.engine.info)

    def answer(generation: Generation) -> TokenIdsAnswer:
        generation.keeps_aborted = True
        made = TokenIdsAnswer(services, body, completion, generation)
        services.server.abortable[caller_of(request).name, made.request_id] = generation
        return made

    return Submission(
        request=submitted,
        answer=answer,
        is_streamed=body.stream,
        is_large=submitted.params.return_routed_experts
        or completion.logprobs is not None
        or completion.prompt_logprobs is not None,
    )


class TokenIdsAnswer(Answer):
    """Renders the choices, unstreamed or as events."""

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
            **kv_transfer.answered(choices),
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
            "routed_experts": None if choice.routes is None else _encoded(choice.routes, self._services.engine.info),
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


def _with_experts(
    submitted: ClientRequest, body: TokenIdsBody, asked: dict[str, Any], info: EngineInfo
) -> ClientRequest:
    """The request with what it asks of a mixture's experts, which are shown where they are kept, and with those that it
    gives. Raises ``InvalidParameter``."""
    if not isinstance(asked.setdefault("return_routed_experts", info.routes is not None), bool):
        raise InvalidParameter("return_routed_experts", "'return_routed_experts' must be true or false.")
    submitted = dataclasses.replace(submitted, params=msgspec.structs.replace(submitted.params, **asked))
    if body.routed_experts is None:
        return submitted
    if info.routes is None or not info.routes.takes_given:
        message = "'routed_experts' is for a mixture of experts with --enable-return-routed-experts, not for Phi's."
        raise UnsupportedParameter("routed_experts", message)
    ids = _decoded(body.routed_experts, info.routes, info.max_model_len)
    # What is cached depends on them, so that it is found by requests with the same alone.
    salt = f"{submitted.cache_salt}/experts-{hashlib.sha256(ids).hexdigest()}"
    return dataclasses.replace(submitted, routes=ids, cache_salt=salt)


def _encoded(routes: bytes, info: EngineInfo) -> str:
    """The experts of positions, [positions, layers, experts of a token], as an .npy file in base64."""
    assert info.routes is not None
    file = io.BytesIO()
    np.save(file, as_array(routes, info.routes))
    return base64.b64encode(file.getbuffer()).decode()


def _decoded(text: str, routes: RoutesInfo, max_model_len: int) -> bytes:
    """Experts in the form of ``Request.routes``. Raises ``InvalidParameter``."""
    shape = routes.num_layers, routes.num_chosen
    if len(text) > 4096 + 11 * max_model_len * shape[0] * shape[1]:  # of eight bytes each, in base64
        raise InvalidParameter("routed_experts", f"'routed_experts' must have at most {max_model_len} positions.")
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        np.lib.format.read_magic(file)
        found, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        ids = np.frombuffer(file.read(), dtype)
    except (binascii.Error, ValueError, TypeError, LookupError):
        ids, found, is_fortran = np.zeros(0, np.uint8), (), False
    if ids.dtype.kind not in "ui" or is_fortran or len(found) != 3 or found[1:] != shape or ids.size != np.prod(found):
        message = f"'routed_experts' must be an .npy file in base64 of integers [positions, {shape[0]}, {shape[1]}]."
        raise InvalidParameter("routed_experts", message)
    ids = ids.reshape(found)
    if len(ids) > max_model_len:
        raise InvalidParameter("routed_experts", f"'routed_experts' must have at most {max_model_len} positions.")
    ordered = np.sort(ids[:, routes.layers], axis=-1)
    if ids.size and (ids.min() < 0 or ids.max() >= routes.num_experts or (ordered[..., 1:] == ordered[..., :-1]).any()):
        message = f"'routed_experts' must have distinct numbers below {routes.num_experts} for each token and layer."
        raise InvalidParameter("routed_experts", message)
    return ids.astype(np.uint16).tobytes()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_line(value) + b"\n\n"


async def abort_by_id(request: Request) -> Response:
    """Ids that are not running, or of other API keys, are passed over."""
    server = server_of(request)
    _, body, headers = await server.read(request, abort_decoder)
    return json_response({"status": "ok", "aborted": server.abort(request, body.request_ids)}, headers)


_IGNORED: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": (),
    "reasoning_ended": (True,),
    "reasoning_parser_kwargs": (),
}
"""About other servers, and about where a grammar begins, which the grammars of ``/render`` say themselves."""
_decoder = BodyDecoder(
    TokenIdsBody, {"features": (), "content_parts": ()}, frozenset(("token_offsets", "assistant_tokens_mask")), _IGNORED
)
abort_decoder = BodyDecoder(AbortBody)
TOKEN_IDS = Dialect(_decoder, _translate)
ENDPOINTS = [
    TOKEN_IDS.endpoint("/inference/v1/generate", "Continue token ids by token ids, as trainers do", "generate_tokens"),
    Endpoint(
        "POST",
        "/inference/v1/abort_requests",
        abort_by_id,
        "End requests for token ids, with what they have",
        AbortBody,
    ),
]
