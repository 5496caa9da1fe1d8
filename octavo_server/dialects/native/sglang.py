"""POST /generate with ``text`` or ``input_ids``: SGLang's own API, in which trainers ask for tokens and their
log-probabilities.

https://docs.sglang.io/basic_usage/native_api.html and sampling_params.html
"""

from __future__ import annotations

import base64
import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.runner.route_reading import as_array
from octavo.errors import InvalidParameter
from octavo.types import TokenLogprobs
from octavo_server.dialects.chat_reply import FieldNames
from octavo_server.dialects.native.token_ids import MAX_REQUEST_ID
from octavo_server.dialects.openai.answer_parts import TokenNames, finite
from octavo_server.dialects.openai.completions import client_request
from octavo_server.dialects.openai.completions import decoder as completion_decoder
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.response import encode, encode_line, json_response
from octavo_server.pipeline import Answer, Submission
from octavo_server.services import ModelServices, asked_services_of
from octavo_server.tenants.api_keys import caller_of

DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1,
}
"""Of SGLang, whatever the model recommends."""
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}
"""Sampling parameters that completions call otherwise."""
SAME = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("n", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias"),
    }
)
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("image_data", "video_data", "audio_data", "input_embeds", "session_params"), ()),
    **dict.fromkeys(("token_ids_logprob", "custom_logit_processor"), ()),
    "return_hidden_states": (False,),
}
"""Fields that would change the answer, with values that would not."""
WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens", "stream_interval"})
_OWN_NAMES = {own: f"sampling_params.{name}" for name, own in NAMES.items()} | dict.fromkeys(
    ("logprobs", "prompt_logprobs"), "top_logprobs_num"
)


class SglangFields(msgspec.Struct, kw_only=True):
    """What a body in SGLang's form has."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] = {}
    rid: str | None = None
    lora_path: str | None = None
    """The name of an adapter that is loaded."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool = False
    stream: bool = False
    timeout: float | None = None


def submission(body: SglangFields, services: ModelServices, request: Request) -> Submission:
    """Tokens for a prompt, or for each of a list. Raises ``RequestError``."""
    if body.text is not None and body.input_ids is not None:
        raise InvalidParameter("input_ids", "'text' and 'input_ids' cannot be given together.")
    if len(body.rid or "") > MAX_REQUEST_ID:
        raise InvalidParameter("rid", f"'rid' must have at most {MAX_REQUEST_ID} characters.")
    # Without the prompt, which was decoded already, and may be megabytes.
    fields: dict[str, Any] = {"prompt": [], "timeout": body.timeout, "model": body.lora_path}
    given = {name: value for name, value in body.sampling_params.items() if value not in (None, "", {})}
    for name, value in (DEFAULTS | given).items():
        if name in NAMES or name in SAME:
            fields[NAMES.get(name) or name] = value
        elif name not in WITHOUT_EFFECT:
            raise UnsupportedParameter(f"sampling_params.{name}")
    if body.return_logprob:
        fields["logprobs"] = body.top_logprobs_num
        if body.logprob_start_len >= 0:
            fields["prompt_logprobs"] = body.top_logprobs_num
    names = FieldNames({**_OWN_NAMES, "model": "lora_path", "prompt": "input_ids" if body.text is None else "text"})
    with names.in_errors():
        completion, _ = completion_decoder.read(encode(fields), services.engine.info.max_model_len)
        prompt: Any = body.input_ids if body.text is None else body.text
        submitted = client_request(msgspec.structs.replace(completion, prompt=prompt), services, request)
    if body.return_routed_experts:
        params = msgspec.structs.replace(submitted.params, return_routed_experts=True)
        submitted = dataclasses.replace(submitted, params=params)
    is_batch = isinstance(body.text, list) or bool(body.input_ids and isinstance(body.input_ids[0], list))
    is_batch |= submitted.params.n > 1

    def answer(generation: Generation) -> SglangAnswer:
        generation.keeps_aborted = True
        for choice in generation.choices:
            choice.output_tokens = []
        name = body.rid or uuid.uuid4().hex
        services.server.abortable[caller_of(request).name, name] = generation
        return SglangAnswer(body, services, name, is_batch)

    return Submission(
        request=submitted,
        answer=answer,
        is_streamed=body.stream,
        in_words=names.in_errors,
        is_large=body.return_logprob or body.return_routed_experts,
    )


class SglangAnswer(Answer):
    """Renders the choices, unstreamed or as events, each with all of its output so far."""

    def __init__(self, body: SglangFields, services: ModelServices, name: str, is_batch: bool) -> None:
        self._body = body
        self._name = name
        self._is_batch = is_batch
        self._names = TokenNames(services.tokenizer, as_ids=False)
        self._routes = services.engine.info.routes
        self._texts: dict[int, str] = {}
        self._lists: dict[tuple[int, str], bytearray] = {}
        """The entries of the lists of log-probabilities as JSON, by choice and name: each event has them all."""

    def unstreamed(self, choices: list[GeneratedChoice]) -> object:
        """An object, or a list of them for several prompts or choices."""
        shown = [self._so_far(choice) for choice in choices]
        return shown if self._is_batch else shown[0]

    def frames(self, choice: GeneratedChoice) -> bytes:
        place = {"index": choice.index} if self._is_batch else {}
        return b"data: " + encode_line({**self._so_far(choice), **place}) + b"\n\n"

    def _so_far(self, choice: GeneratedChoice) -> dict[str, Any]:
        update, index = choice.take(), choice.index
        is_first = index not in self._texts
        self._texts[index] = self._texts.get(index, "") + update.text
        name = f"{self._name}-{index}" if self._is_batch else self._name
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": _reason(choice),
            "prompt_tokens": len(choice.prompt.tokens),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": choice.num_cached_tokens,
            "weight_version": choice.weight_versions[-1][0],
        }
        if choice.routes is not None and self._routes is not None:
            experts = as_array(choice.routes, self._routes).astype("<i4")
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        if self._body.return_logprob:
            meta |= self._logprobs(index, "output", [entry.token_id for entry in update.logprobs], update.logprobs)
            start = self._body.logprob_start_len
            of_prompt = choice.prompt_logprobs[start:] if is_first and start >= 0 else []
            meta |= self._logprobs(index, "input", choice.prompt.tokens[start:] if of_prompt else [], of_prompt)
        return {"text": self._texts[index], "output_ids": choice.output_tokens, "meta_info": meta}

    def _logprobs(
        self, index: int, kind: str, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """Of each token so far, of which these are new; and of the most likely ones in its place, if asked for."""
        own = [
            self._triple(token, None if entry is None else entry.logprob)
            for token, entry in zip(tokens, entries, strict=True)
        ]
        added: dict[str, list[Any]] = {f"{kind}_token_logprobs": own}
        if self._body.top_logprobs_num:
            added[f"{kind}_top_logprobs"] = [
                None if entry is None else [*map(self._triple, entry.top_ids, entry.top_logprobs)] for entry in entries
            ]
        return {name: self._extended(index, name, values) for name, values in added.items()}

    def _extended(self, index: int, name: str, values: list[Any]) -> msgspec.Raw:
        """A list with ``values`` at its end, as JSON."""
        text = self._lists.setdefault((index, name), bytearray())
        if values:
            text += (b"," if text else b"") + encode(values)[1:-1]
        return msgspec.Raw(b"[" + text + b"]")

    def _triple(self, token: int, logprob: float | None) -> list[Any]:
        text = self._names.name(token) if self._body.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token, text]


def _reason(choice: GeneratedChoice) -> dict[str, Any] | None:
    reason, tokens = choice.finish_reason, choice.output_tokens
    if reason is None:
        return None
    if reason == "length":
        return {"type": reason, "length": choice.num_tokens}
    if reason != "stop":
        return {"type": reason, "message": "The request was ended."}
    matched = choice.stop_reason
    return {"type": reason, "matched": tokens[-1] if matched is None and tokens else matched}


async def model_info(request: Request) -> Response:
    services = asked_services_of(request)
    model = services.config.model
    members = {
        "model_path": model.model,
        "tokenizer_path": model.tokenizer or model.model,
        "is_generation": "generate" in services.engine.info.tasks,
        "preferred_sampling_params": None,
        "weight_version": services.engine.weight_version,
    }
    return json_response(members, {})


ENDPOINTS = [
    Endpoint("GET", path, model_info, "The model, as SGLang describes it")
    for path in ("/model_info", "/get_model_info")
]
