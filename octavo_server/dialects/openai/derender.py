"""POST /v1/chat/completions/derender, /v1/completions/derender: generated token ids as the answer that a client gets.

What /inference/v1/generate answered is read as if this server had generated it: text, reasoning, tool calls and
log-probabilities are those of the coupled endpoint. A stream is read event by event; the client carries its state, the
tokens so far, which are read again for each event.
https://docs.vllm.ai/en/latest/serving/online_serving/derenderer/
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ContextLengthExceeded, InvalidParameter
from octavo.text.tokenizer import check_in_vocabulary
from octavo.types import REPETITION, FinishReason, Output, TokenLogprobs
from octavo.types import Request as EngineRequest
from octavo_server.admission import ClientRequest
from octavo_server.dialects.openai import chat_body, completions
from octavo_server.dialects.openai.chat import ChatAnswer
from octavo_server.dialects.openai.chat_body import ChatBody
from octavo_server.dialects.openai.completions import CompletionAnswer, CompletionBody
from octavo_server.generation import GeneratedChoice, Generation, Prompt
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import ModelServices, server_of
from octavo_server.tenants.api_keys import caller_of

UNKNOWN = TokenLogprobs(0, 0.0, 0, [], [])
"""Of tokens that an earlier call has shown."""


class GeneratedPart(msgspec.Struct, kw_only=True):
    """A choice of /inference/v1/generate, or a piece of it."""

    index: int = 0
    token_ids: list[int] | None = None
    logprobs: dict[str, list[dict[str, Any]] | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Generated(msgspec.Struct, kw_only=True):
    """An answer of /inference/v1/generate, or an event of its stream."""

    request_id: str = ""
    choices: list[GeneratedPart]
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    output_mode: str = "tokens"
    kv_transfer_params: dict[str, Any] | None = None


class StreamState(msgspec.Struct, kw_only=True):
    """What a client carries from one event of a stream to the next."""

    output_token_ids: list[int] = []
    role_sent: bool = False


class DerenderChatBody(msgspec.Struct, kw_only=True):
    """The body of a request to read the answer to a conversation."""

    model: str = ""
    generate_response: Generated | None = None
    generate_chunk: Generated | None = None
    chat_request: dict[str, Any] | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    stream: bool = False
    stream_state: StreamState | None = None


class DerenderCompletionBody(msgspec.Struct, kw_only=True):
    """The body of a request to read the answers to prompts."""

    model: str = ""
    generate_responses: list[Generated] = []
    generate_chunk: Generated | None = None
    completion_request: dict[str, Any] | None = None
    prompt_tokens: int | list[int] | None = None
    prompt_token_ids: list[int | list[int] | None] | None = None
    stream: bool = False
    stream_state: StreamState | None = None


class _NoEngine:
    """Of generations that are read and not computed."""

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        pass


class Reading(NamedTuple):
    """A request whose answer is read: a conversation, or prompts of completions."""

    services: ModelServices
    submitted: ClientRequest
    prompt_text: str | None
    answer: Callable[[Generation], ChatAnswer | CompletionAnswer]
    """Makes the answer of a generation."""

    def begun(self, prompts: Sequence[tuple[list[int], int]]) -> Generation:
        """A generation with choices as ``Admission`` adds them, for each prompt so many."""
        generation, submitted = Generation(_NoEngine()), self.submitted
        for ids, count in prompts:
            prompt = Prompt(ids, self.prompt_text)
            for _ in range(count):
                request = EngineRequest(0, ids, submitted.params, max_tokens=0)
                shown, marks = submitted.shown_ids, submitted.answer_marks
                generation.add(prompt, request, self.services.tokenizer, shown, marks)
        return generation


async def derender_chat(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, _chat_decoder)
    given = _given(body.generate_chunk, body.generate_response, body.stream, "generate_response")
    return await _answered(request, services, headers, lambda: _chat(body, given, services, request))


async def derender_completion(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, _completion_decoder)
    if not body.stream and not body.generate_responses:
        raise MissingParameter("generate_responses")
    return await _answered(request, services, headers, lambda: _completion(body, services, request))


def _given(chunk: Generated | None, whole: Generated | None, is_stream: bool, name: str) -> Generated:
    found, name = (chunk, "generate_chunk") if is_stream else (whole, name)
    if found is None:
        raise MissingParameter(name)
    return found


async def _answered(request: Request, services: ModelServices, headers: dict[str, str], read: Any) -> Response:
    """Read in a thread, as texts are tokenised."""
    services.need_tokenizer("model")
    caller = caller_of(request)
    with services.admission.reserved(caller):
        async with services.admission.tokenising.place(caller.name):
            result = await asyncio.to_thread(read)
    return json_response(result, headers)


def _chat(body: DerenderChatBody, given: Generated, services: ModelServices, request: Request) -> dict[str, Any]:
    services.check_model(body.model)
    if body.chat_request is None:
        if services.message_format.reader(None, "") is not None:
            raise MissingParameter("chat_request")  # without it nobody knows what of the text is reasoning
        asked = ChatBody(messages=[{"role": "user", "content": "-"}])
    else:
        asked, _ = chat_body.decoder.read(msgspec.json.encode(body.chat_request), services.engine.info.max_model_len)
    submitted = chat_body.client_request(asked, services, request, chat_body.tools_of(asked, services))
    source = submitted.prompts[0]
    text = source().seen if callable(source) and body.chat_request is not None else ""
    num_top = _num_top(given)
    shown = msgspec.structs.replace(
        asked, stream=body.stream, logprobs=num_top is not None, top_logprobs=num_top or 0, logprob_token_ids=[]
    )
    tools = chat_body.tools_of(shown, services)
    reading = Reading(services, submitted, text, lambda generation: ChatAnswer(services, shown, generation, tools))
    ids = body.prompt_token_ids or given.prompt_token_ids or []
    if body.stream:
        return _read_event(reading, given, ids, body.prompt_tokens, body.stream_state)
    return _read_all(reading, [given], [ids], [body.prompt_tokens])


def _completion(body: DerenderCompletionBody, services: ModelServices, request: Request) -> dict[str, Any]:
    services.check_model(body.model)
    asked = CompletionBody(prompt="-")
    if body.completion_request is not None:
        fields = msgspec.json.encode(body.completion_request)
        asked, _ = completions.decoder.read(fields, services.engine.info.max_model_len)
    submitted = completions.client_request(asked, services, request)
    answers = body.generate_responses
    if body.stream:
        answers = [_given(body.generate_chunk, None, True, "")]
    num_top = max((count for given in answers if (count := _num_top(given)) is not None), default=None)
    shown = msgspec.structs.replace(asked, stream=body.stream, logprobs=num_top, echo=False, best_of=None)
    reading = Reading(services, submitted, None, lambda generation: CompletionAnswer(services, shown, generation))
    if body.stream:
        state_ids = [each for each in body.prompt_token_ids or [] if isinstance(each, int)]
        count = body.prompt_tokens if isinstance(body.prompt_tokens, int) else None
        return _read_event(reading, answers[0], state_ids, count, body.stream_state)
    ids = _of_each(body.prompt_token_ids, len(answers), "prompt_token_ids")
    if any(isinstance(each, int) for each in ids):
        raise InvalidParameter("prompt_token_ids", "'prompt_token_ids' must be lists, one for each of the answers.")
    ids = [each or given.prompt_token_ids or [] for each, given in zip(ids, answers, strict=True)]
    return _read_all(reading, answers, ids, _of_each(body.prompt_tokens, len(answers), "prompt_tokens"))


def _of_each(given: Any, count: int, name: str) -> list[Any]:
    if given is None:
        return [None] * count
    if not isinstance(given, list) or len(given) != count:
        raise InvalidParameter(name, f"'{name}' must have an entry for each of 'generate_responses'.")
    return given


def _read_all(
    reading: Reading,
    answers: Sequence[Generated],
    prompt_ids: Sequence[list[int]],
    prompt_counts: Sequence[int | None],
) -> dict[str, Any]:
    """The whole answer. Raises ``InvalidParameter``."""
    for given in answers:
        _check(given, reading.services)
    parts = [part for given in answers for part in sorted(given.choices, key=lambda part: part.index)]
    generation = reading.begun([(ids, len(given.choices)) for ids, given in zip(prompt_ids, answers, strict=True)])
    answer = reading.answer(generation)
    for choice, part in zip(generation.choices, parts, strict=True):
        _feed(choice, part)
    shown = answer.unstreamed(generation.choices)
    num_prompt = sum(len(ids) if count is None else count for ids, count in zip(prompt_ids, prompt_counts, strict=True))
    return {
        **shown,
        "id": answers[0].request_id or shown["id"],
        "usage": _counted(shown["usage"] | _cached([given.usage or {} for given in answers]), num_prompt),
        "kv_transfer_params": answers[0].kv_transfer_params,
    }


def _read_event(
    reading: Reading,
    given: Generated,
    prompt_ids: list[int],
    prompt_count: int | None,
    state: StreamState | None,
) -> dict[str, Any]:
    """The chunk of one event, and the state for the next one. Raises ``InvalidParameter``."""
    _check(given, reading.services)
    if len(given.choices) > 1:
        raise InvalidParameter("generate_chunk", "'generate_chunk' must have at most one choice.")
    state = state or StreamState()
    _check_ids(state.output_token_ids, reading.services, "stream_state")
    index = given.choices[0].index if given.choices else 0
    generation = reading.begun([(prompt_ids, index + 1)])
    answer, choice = reading.answer(generation), generation.choices[index]
    if state.role_sent:
        choice.on_output(Output(0, state.output_token_ids, logprobs=[UNKNOWN] * len(state.output_token_ids)))
        answer.frames(choice)
    tokens = state.output_token_ids
    frames = b""
    if given.choices and choice.finish_reason is None:
        _feed(choice, given.choices[0])
        tokens = [*tokens, *(given.choices[0].token_ids or ())]
        frames = answer.frames(choice)
    chunks = [msgspec.json.decode(line[6:]) for line in frames.split(b"\n\n") if line]
    chunk = _joined(chunks) if chunks else {**answer.identity.as_dict(), "choices": []}
    chunk["id"] = given.request_id or chunk["id"]
    if given.usage is not None:
        num_prompt = given.usage.get("prompt_tokens", 0) if prompt_count is None else prompt_count
        chunk["usage"] = _counted(given.usage, num_prompt)
    return {"chunk": chunk, "stream_state": StreamState(output_token_ids=tokens, role_sent=True)}


def _check(given: Generated, services: ModelServices) -> None:
    """Raise ``InvalidParameter`` for what no /inference/v1/generate answers."""
    if given.output_mode != "tokens":
        message = "'output_mode' must be 'tokens': texts are read already, and have no stop strings any more."
        raise InvalidParameter("output_mode", message)
    most = services.config.server.max_n
    if len(given.choices) > most or not all(0 <= part.index < most for part in given.choices):
        raise InvalidParameter("choices", f"'choices' must have at most {most} (max_n), with an 'index' below that.")
    if any(type((given.usage or {}).get(name, 0)) is not int for name in ("prompt_tokens", "completion_tokens")):
        raise InvalidParameter("usage", "'usage' must have whole numbers of 'prompt_tokens' and 'completion_tokens'.")
    for part in given.choices:
        _check_ids(part.token_ids or [], services, "token_ids")


def _check_ids(tokens: list[int], services: ModelServices, field: str) -> None:
    limit = services.engine.info.max_model_len
    if len(tokens) > limit:
        message = f"This model's maximum context length is {limit} tokens; '{field}' has {len(tokens)}."
        raise ContextLengthExceeded(message, param=field)
    check_in_vocabulary(tokens, field, services.engine.info)


def _feed(choice: GeneratedChoice, part: GeneratedPart) -> None:
    """Let a choice have the output of ``part``."""
    tokens, entries = part.token_ids or [], (part.logprobs or {}).get("content")
    logprobs = None if entries is None else [_entry(entry) for entry in entries]
    if logprobs is not None and len(logprobs) != len(tokens):
        raise InvalidParameter("logprobs", "'logprobs.content' must have an entry for each of 'token_ids'.")
    is_ended = part.finish_reason in ("stop", "length")
    reason = part.finish_reason if is_ended else None
    stop = part.stop_reason
    if isinstance(stop, str) and stop != REPETITION:
        reason = None  # the text finds its stop string again; with this reason, its last token would be no text
    choice.on_output(Output(0, tokens, reason, stop if isinstance(stop, int) else None, logprobs=logprobs))
    if part.finish_reason is not None and choice.finish_reason is None:
        choice.abort()
        choice.finish_reason = "stop" if part.finish_reason == "stop" else "abort"


def _entry(given: dict[str, Any]) -> TokenLogprobs:
    """A log-probability of /inference/v1/generate. Raises ``InvalidParameter``."""
    try:
        top = sorted((_candidate(each) for each in given.get("top_logprobs") or ()), key=lambda each: each[2])
        token, logprob, rank = _candidate(given)
    except (TypeError, ValueError, AttributeError, KeyError):
        message = "'logprobs.content' must have entries with 'token_id' and 'logprob', and 'top_logprobs' of these."
        raise InvalidParameter("logprobs", message) from None
    return TokenLogprobs(token, logprob, rank, [each[0] for each in top], [each[1] for each in top])


def _candidate(given: dict[str, Any]) -> tuple[int, float, int]:
    """Token id, log-probability and rank; older servers write ids as ``token_id:7``."""
    token = given.get("token_id")
    if token is None:
        token = str(given["token"]).removeprefix("token_id:")
    return int(token), float(given["logprob"]), int(given.get("rank") or 0)


def _num_top(given: Generated) -> int | None:
    """The most likely tokens that an answer has at a position, at most; ``None`` without log-probabilities."""
    entries = [part.logprobs["content"] for part in given.choices if part.logprobs and part.logprobs.get("content")]
    if not entries:
        return None
    tops = (entry.get("top_logprobs") for part in entries for entry in part or ())
    return max(len(top) if isinstance(top, list) else 0 for top in tops)


def _cached(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The count of cached tokens of all answers."""
    details = [each.get("prompt_tokens_details") for each in usages]
    counts = [each.get("cached_tokens") for each in details if isinstance(each, dict)]
    return {"prompt_tokens_details": {"cached_tokens": sum(count for count in counts if isinstance(count, int))}}


def _counted(usage: dict[str, Any], num_prompt: int) -> dict[str, Any]:
    return {**usage, "prompt_tokens": num_prompt, "total_tokens": num_prompt + usage.get("completion_tokens", 0)}


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Chunks of one choice as one."""
    first = chunks[0]
    choice = first["choices"][0]
    for chunk in chunks[1:]:
        for name, value in chunk["choices"][0].items():
            if name == "delta":
                _extend(choice["delta"], value)
            elif value is not None:
                choice[name] = value
    return first


def _extend(delta: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        delta[name] = delta[name] + value if name in delta and name != "role" else value


_chat_decoder = BodyDecoder(DerenderChatBody)
_completion_decoder = BodyDecoder(DerenderCompletionBody)
ENDPOINTS = [
    Endpoint(
        *("POST", "/v1/chat/completions/derender", derender_chat, "Generated token ids as a chat completion"),
        DerenderChatBody,
    ),
    Endpoint(
        *("POST", "/v1/completions/derender", derender_completion, "Generated token ids as a completion"),
        DerenderCompletionBody,
    ),
]
