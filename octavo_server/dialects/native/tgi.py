"""POST / and POST /generate_stream: the API of Text Generation Inference, which Hugging Face's clients speak.

https://huggingface.github.io/text-generation-inference/
"""

from __future__ import annotations

import codecs
import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ContextLengthExceeded, InvalidParameter, RequestError
from octavo.sampling_params import MAX_STOP_STRINGS
from octavo.text.tokenizer import Tokenizer
from octavo_server.dialects.chat_reply import FieldNames
from octavo_server.dialects.openai.common_fields import sampling
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.dialects.tei.endpoints import description, embed, predict
from octavo_server.generation import ChoiceUpdate, GeneratedChoice
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter, typed_errors
from octavo_server.http.request_body import BodyDecoder, MalformedJSON
from octavo_server.http.response import EventStream, encode_line, json_response
from octavo_server.image_files import MARKDOWN_IMAGE, MarkedText
from octavo_server.observe.probes import version
from octavo_server.pipeline import Answer, Dialect, Submission
from octavo_server.services import ModelServices, asked_services_of

DEFAULT_NEW_TOKENS = 100
SAMPLING = ("temperature", "top_k", "top_p", "typical_p")
"""Parameters that ask for random tokens; without them and ``do_sample`` the most likely ones are taken."""
REFUSED = ("decoder_input_details", "top_n_tokens", "truncate", "typical_p", "watermark")
GRAMMARS = {"json": "guided_json", "json_schema": "guided_json", "regex": "guided_regex"}
IN_WORDS = FieldNames(
    {name: f"parameters.{name}" for name in (*SAMPLING, "repetition_penalty", "frequency_penalty", "seed", "stop")}
    | {**dict.fromkeys(GRAMMARS.values(), "parameters.grammar"), "max_tokens": "parameters.max_new_tokens"}
    | {"model": "parameters.adapter_id", "prompt": "inputs"}
).in_errors
"""Lets errors name the fields of this API."""


ERRORS = typed_errors("TGIError", ("overloaded", "validation", "generation"), ("/", "/generate_stream"))


class Parameters(msgspec.Struct, kw_only=True):
    """How to generate."""

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_sequences: list[str] | None = None
    """The older name of ``stop``."""
    return_full_text: bool | None = None
    details: bool | None = None
    grammar: dict[str, Any] | None = None
    best_of: int | None = None
    adapter_id: str | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: int | None = None
    truncate: int | None = None
    watermark: bool | None = None


class TGIBody(msgspec.Struct, kw_only=True):
    """The body of a request to continue a text."""

    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    stream: bool = False
    timeout: float | None = None


async def _translate(body: TGIBody, services: ModelServices, request: Request) -> Submission:
    return continuation(body, services, request)


def continuation(body: TGIBody, services: ModelServices, request: Request, is_list: bool = True) -> Submission:
    """The request; unstreamed its answer is an object, or a list of one if ``is_list``. Raises ``RequestError``."""
    tokenizer = services.need_tokenizer("inputs")
    with IN_WORDS():
        submitted = client_request(_completion(body, services), services, request)
    image_text = services.admission.image_text
    if image_text is not None and services.takes_images and MARKDOWN_IMAGE.search(body.inputs):
        text = MarkedText(body.inputs, image_text, "inputs")
        submitted = dataclasses.replace(submitted, prompts=[text], prompt_field="inputs")
    return Submission(
        request=submitted,
        answer=lambda generation: TGIAnswer(body, tokenizer, is_list),
        is_streamed=body.stream,
        stream=TGIStream,
        in_words=IN_WORDS,
    )


async def _translate_stream(body: TGIBody, services: ModelServices, request: Request) -> Submission:
    return await _translate(msgspec.structs.replace(body, stream=True), services, request)


_STATUSES: dict[type[RequestError], int] = {
    ContextLengthExceeded: 422,
    InvalidParameter: 422,
    MalformedJSON: 422,
}


async def info(request: Request) -> Response:
    """What clients of TGI ask a server about itself, or those of TEI one whose model generates nothing."""
    services = asked_services_of(request)
    engine = services.engine.info
    if "generate" not in engine.tasks:
        return json_response(description(services), {})
    members = {
        "model_id": services.model_name,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": engine.max_num_seqs + services.config.server.max_num_queued_reqs,
        "max_best_of": 1,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_input_tokens": engine.max_model_len - 1,
        "max_total_tokens": engine.max_model_len,
        "router": "octavo",
        "version": version(),
    }
    return json_response(members, {})


def _completion(body: TGIBody, services: ModelServices) -> CompletionBody:
    """The request as a completion body. Raises ``InvalidParameter``."""
    given = body.parameters
    for name in REFUSED:
        if getattr(given, name):
            raise UnsupportedParameter(f"parameters.{name}")
    if given.best_of not in (None, 1):
        raise UnsupportedParameter("parameters.best_of")
    is_random = given.do_sample or any(getattr(given, name) is not None for name in SAMPLING)
    return CompletionBody(
        model=given.adapter_id or "",
        prompt=body.inputs,
        timeout=body.timeout,
        max_tokens=DEFAULT_NEW_TOKENS if given.max_new_tokens is None else given.max_new_tokens,
        sampling=sampling(
            temperature=given.temperature if is_random else 0.0,
            top_k=given.top_k,
            top_p=given.top_p,
            repetition_penalty=given.repetition_penalty,
            frequency_penalty=given.frequency_penalty,
            seed=given.seed,
            include_stop_str_in_output=True,
        ),
        stop=[*(given.stop or ()), *(given.stop_sequences or ())],
        logprobs=0,
        **_constraint(given.grammar),
    )


def _constraint(grammar: dict[str, Any] | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    field = GRAMMARS.get(str(grammar.get("type")))
    value = grammar.get("value")
    if field is None or not isinstance(value, str if field == "guided_regex" else dict | str):
        message = "'parameters.grammar' must be of type 'json' with a schema as 'value', or 'regex' with a pattern."
        raise InvalidParameter("parameters.grammar", message)
    return {field: value}


class TGIAnswer(Answer):
    """Renders one choice, unstreamed or as events."""

    def __init__(self, body: TGIBody, tokenizer: Tokenizer, is_list: bool) -> None:
        self._body = body
        self._is_list = is_list
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts: list[str] = [body.inputs] if body.parameters.return_full_text and not body.stream else []
        self._num_events = 0

    def unstreamed(self, choices: list[GeneratedChoice]) -> object:
        """The answer, once its choice is finished."""
        (choice,) = choices
        update = choice.take()
        answer: dict[str, Any] = {"generated_text": "".join([*self._texts, update.text])}
        if self._body.parameters.details:
            answer["details"] = {**self._details(choice), "prefill": [], "tokens": self._tokens(update)}
        return [answer] if self._is_list else answer

    def frames(self, choice: GeneratedChoice) -> bytes:
        """An event for each token; the last one has the whole text."""
        update = choice.take()
        self._texts.append(update.text)
        tokens, data = self._tokens(update), b""
        for place, token in enumerate(tokens):
            is_last = choice.finish_reason is not None and place == len(tokens) - 1
            self._num_events += 1
            event = {
                "index": self._num_events,
                "token": token,
                "generated_text": "".join(self._texts) if is_last else None,
                "details": self._details(choice) if is_last else None,
            }
            data += b"data:" + encode_line(event) + b"\n\n"
        return data

    def _tokens(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        """The tokens. Where their texts are not the update's, which stop strings hold back, it is the last one's."""
        special = self._tokenizer.special_token_ids
        texts = [
            self._decoder.decode(b"" if id in special else self._tokenizer.token_bytes(id)) for id in update.tokens
        ]
        if "".join(texts) != update.text:
            texts = [*[""] * (len(update.tokens) - 1), update.text]
        return [
            {"id": id, "text": text, "logprob": entry.logprob, "special": id in special}
            for id, text, entry in zip(update.tokens, texts, update.logprobs, strict=False)
        ]

    def _details(self, choice: GeneratedChoice) -> dict[str, Any]:
        reason = choice.finish_reason
        if reason == "stop":
            reason_shown = "stop_sequence" if isinstance(choice.stop_reason, str) else "eos_token"
        else:
            reason_shown = reason or ""
        counts = {"generated_tokens": choice.num_tokens, "input_length": len(choice.prompt.tokens)}
        return {"finish_reason": reason_shown, **counts, "seed": self._body.parameters.seed}


class TGIStream(EventStream):
    """Events without a final ``[DONE]``."""

    END = b""

    def error_frames(self, error: RequestError) -> bytes:
        return b"data:" + encode_line(ERRORS.body(error)) + b"\n\n"


_decoder = BodyDecoder(TGIBody, {}, frozenset({"options"}))
TEXT = Dialect(_decoder, _translate, statuses=_STATUSES)


async def of_any_kind(request: Request) -> Response:
    """Continue a text, or do what the model does with one, as TEI's root does. Raises ``RequestError``."""
    tasks = asked_services_of(request).engine.info.tasks
    if "generate" in tasks:
        return await TEXT.serve(request)
    return await (predict if "classify" in tasks else embed)(request)


STREAM = Dialect(_decoder, _translate_stream, statuses=_STATUSES)
ENDPOINTS = [
    Endpoint("GET", "/info", info, "Model and limits, as TGI says them"),
    Endpoint("POST", "/", of_any_kind, "Continue a text, as TGI does", TGIBody, name="continue_text", errors=ERRORS),
    STREAM.endpoint("/generate_stream", "Continue a text, an event for each token, as TGI does", "stream_text", ERRORS),
]
