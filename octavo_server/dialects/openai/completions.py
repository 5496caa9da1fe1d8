"""POST /v1/completions: text or token ids in, their continuation out.

https://platform.openai.com/docs/api-reference/completions, with ``echo`` and ``logprobs`` as evaluation harnesses use
them: the lists cover an echoed prompt too, and ``max_tokens`` 0 only scores it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.grammar import forms
from octavo.sampling_params import SamplingParams
from octavo.text.text_stream import TextStream
from octavo_server.admission import ClientRequest
from octavo_server.dialects.openai import beam_search, kv_transfer
from octavo_server.dialects.openai.answer_parts import (
    ChunkFrame,
    CompletionLogprobs,
    ReplyIdentity,
    TokenNames,
    finite,
    identity_of,
    prompt_logprobs,
    usage,
)
from octavo_server.dialects.openai.common_fields import (
    ACCEPTED,
    IGNORED,
    NO_LIMIT,
    REFUSED,
    SAMPLING,
    GenerationFields,
    check_generation_fields,
    sampling_params,
    scheduling_fields,
    without_effect,
)
from octavo_server.dialects.openai.constraints import OWN_KIND, constraint
from octavo_server.generation import ChoiceUpdate, GeneratedChoice, Generation
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import encode, encode_line, json_response
from octavo_server.pipeline import Dialect, Submission
from octavo_server.services import ModelServices

DEFAULT_MAX_TOKENS = 16

_GOES_ON = b',"logprobs":null,"finish_reason":null,"stop_reason":null'
_ENDS = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b'


class CompletionBody(GenerationFields, kw_only=True):
    """The body of a completion request with one or several prompts."""

    prompt: str | list[int | str | list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    add_special_tokens: bool = True


_REFUSED = {name: neutral for name, neutral in REFUSED.items() if name != "use_beam_search"}
decoder = BodyDecoder(CompletionBody, _REFUSED | {"early_stopping": (), "suffix": ()}, ACCEPTED, IGNORED, SAMPLING)


async def _translate(body: CompletionBody, services: ModelServices, request: Request) -> Submission | Response:
    submitted = client_request(body, services, request)
    if body.use_beam_search:
        return json_response(await _found_by_beams(body, services, submitted, request), request.state.headers)
    return Submission(
        request=submitted,
        answer=lambda generation: CompletionAnswer(services, body, generation),
        is_streamed=body.stream,
        is_large=submitted.params.logprobs is not None or submitted.params.prompt_logprobs is not None,
        is_resumable=True,
    )


def _without_effect(body: CompletionBody, services: ModelServices) -> list[str]:
    """Fields that are ignored in this request."""
    if not body.use_beam_search:
        return without_effect(body, services) + (["length_penalty"] if body.length_penalty != 1.0 else [])
    return [name for name in beam_search.IRRELEVANT if getattr(body, name, body.sampling.get(name)) is not None]


async def _found_by_beams(
    body: CompletionBody, services: ModelServices, submitted: ClientRequest, request: Request
) -> dict[str, Any]:
    """The response to a beam search: ``n`` choices for each prompt, best first."""
    limits = (submitted.timeout, services.config.server.request_timeout)
    time_limit = min((limit for limit in limits if limit is not None), default=None)
    found = await beam_search.search_beams(services.admission, submitted, body.length_penalty, time_limit, request)
    shows_ids, choices = body.return_token_ids or services.tokenizer is None, list[dict[str, Any]]()
    for prompt, sequences in found:
        for sequence in sequences:
            tokens = sequence.tokens[len(prompt.tokens) :]
            text = TextStream(services.tokenizer, submitted.params).push(tokens, sequence.finish_reason).text
            choice = {"index": len(choices), "text": text, "logprobs": None, "finish_reason": sequence.finish_reason}
            ids = {"token_ids": tokens, "prompt_token_ids": prompt.tokens} if shows_ids else {}
            choices.append({**choice, "stop_reason": None, **ids})
    counts = {
        "prompt_tokens": sum(len(prompt.tokens) for prompt, _ in found),
        "completion_tokens": sum(
            len(sequence.tokens) - len(prompt.tokens) for prompt, sequences in found for sequence in sequences
        ),
    }
    identity = ReplyIdentity("cmpl", "text_completion", services.answering_name(body.model)).as_dict()
    return {**identity, "choices": choices, "usage": {**counts, "total_tokens": sum(counts.values())}}


def client_request(body: CompletionBody, services: ModelServices, request: Request) -> ClientRequest:
    """The body as a request for admission. Raises ``RequestError``."""
    check_generation_fields(body, services)
    if body.use_beam_search:
        beam_search.check_fields(body)
    if body.logprob_token_ids:
        body.logprobs = len(body.logprob_token_ids)
    echoed = body.logprobs if body.echo else None
    asked_for = constraint(body)
    if asked_for is not None:
        services.need_tokenizer(asked_for.field)
    # ``prompt_logprobs`` (vLLM) and ``echo`` need the same computation; the engine gets the larger number.
    scored = max((k for k in (echoed, body.prompt_logprobs) if k is not None), default=None)
    prompts = prompts_of(body.prompt, "prompt")
    is_bare = asked_for is not None and OWN_KIND not in (body.structured_outputs or {})  # without reasoning to bound
    if is_bare and services.message_format.can_reason and body.sampling.pop("thinking_token_budget", None) is not None:
        services.report(request, ["thinking_token_budget"])
    return ClientRequest(
        **scheduling_fields(body, services, request),
        prompts=prompts,
        transfer=None if body.kv_transfer_params is None else kv_transfer.kv_transfer(body, services, len(prompts)),
        prompt_field="prompt",
        params=_among_best_of(body, services, sampling_params(body, services, body.max_tokens, body.logprobs, scored)),
        default_max_tokens=None if body.max_tokens == NO_LIMIT else DEFAULT_MAX_TOKENS,
        add_special_tokens=body.add_special_tokens,
        grammar=None if asked_for is None else lambda _: forms.grammar_text(asked_for.form),
        grammar_field="" if asked_for is None else asked_for.field,
    )


def _among_best_of(body: CompletionBody, services: ModelServices, params: SamplingParams) -> SamplingParams:
    """Parameters for ``best_of`` sequences, with the log-probabilities to rank them. Raises ``InvalidParameter``."""
    if body.best_of is None or body.best_of == params.n:
        return params
    most = services.config.server.max_n
    if not params.n <= body.best_of <= most:
        message = f"'best_of' must be a whole number from 'n' ({params.n}) to {most} (max_n)."
        raise InvalidParameter("best_of", message)
    if body.stream:
        message = "'best_of' above 'n' cannot be streamed: which texts are best is known when all have ended."
        raise InvalidParameter("best_of", message)
    return msgspec.structs.replace(params, n=body.best_of, logprobs=params.logprobs or 0)


def best(
    taken: list[tuple[GeneratedChoice, ChoiceUpdate]], num_each: int, num_shown: int
) -> list[tuple[GeneratedChoice, ChoiceUpdate]]:
    """Of each prompt's ``num_each`` choices the ``num_shown`` of highest mean token log-probability, best first."""

    def rank(pair: tuple[GeneratedChoice, ChoiceUpdate]) -> float:
        logprobs = pair[1].logprobs
        return -sum(finite(entry.logprob) for entry in logprobs) / max(len(logprobs), 1)

    groups = [sorted(taken[first : first + num_each], key=rank) for first in range(0, len(taken), num_each)]
    return [pair for group in groups for pair in group[:num_shown]]


def prompts_of(prompt: str | list[int | str | list[int]], field: str) -> list[str | list[int]]:
    """The prompts: one, or a list all of one kind. Raises ``InvalidParameter`` about ``field``."""
    if not prompt:
        raise InvalidParameter(field, f"'{field}' must not be empty.")
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts: list[str | list[int]] = [item for item in prompt if isinstance(item, str)]
    lists: list[str | list[int]] = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise InvalidParameter(field, f"'{field}' must hold only strings, only token ids or only lists of token ids.")
    if not all(prompt):
        raise InvalidParameter(field, f"Nothing in '{field}' may be empty.")
    return texts or lists


class CompletionAnswer:
    """Renders the choices of one request, unstreamed or as chunks."""

    def __init__(self, services: ModelServices, body: CompletionBody, generation: Generation) -> None:
        choices = generation.choices
        self.body = body
        self.identity = identity_of(generation, "cmpl", "text_completion", services.answering_name(body.model))
        self.id = self.identity.id
        self._tokenizer = services.tokenizer
        self._names = TokenNames(services.tokenizer, body.return_tokens_as_token_ids)
        self._shows_ids = body.return_token_ids or services.tokenizer is None
        self._has_details = body.logprobs is not None or self._shows_ids
        self._is_plain = not self._has_details and not body.echo
        self._frame = ChunkFrame(self.identity, choices, body.includes_usage, body.has_continuous_usage)
        self._starts = [self._frame.start + b'"index":%d,"text":' % choice.index for choice in choices]
        hidden = frozenset[int]()
        if services.tokenizer is not None and body.skip_special_tokens:
            hidden = services.tokenizer.special_token_ids
        self._logprobs = [CompletionLogprobs(self._names, hidden, body.logprobs or 0) for _ in choices]
        self._unopened = set(range(len(choices)))

    # --- unstreamed ---

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        taken = [(choice, choice.take()) for choice in choices]
        if self.body.best_of is not None and self.body.best_of > self.body.n:
            taken = best(taken, self.body.best_of, self.body.n)
        return {
            **self.identity.as_dict(),
            "choices": [self._unstreamed_choice(index, *pair) for index, pair in enumerate(taken)],
            "usage": usage(choices),
            **kv_transfer.answered(choices),
        }

    def _unstreamed_choice(self, index: int, choice: GeneratedChoice, update: ChoiceUpdate) -> dict[str, Any]:
        result = self._details(choice, update, is_first=True)
        result["index"] = index
        result["finish_reason"] = choice.finish_reason
        result["stop_reason"] = choice.stop_reason
        if self.body.prompt_logprobs is not None:
            entries = choice.prompt_logprobs
            result["prompt_logprobs"] = prompt_logprobs(entries, self._names, self.body.prompt_logprobs)
        return result

    def _details(self, choice: GeneratedChoice, update: ChoiceUpdate, is_first: bool) -> dict[str, Any]:
        """A choice, or a piece of it, with the requested details; the first piece has the echoed prompt."""
        is_echo = is_first and self.body.echo
        result: dict[str, Any] = {
            "index": choice.index,
            "text": (self._prompt_text(choice) if is_echo else "") + update.text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self.body.logprobs is not None:
            entries = list(zip(choice.prompt.tokens, choice.prompt_logprobs, strict=True)) if is_echo else []
            entries += zip(update.tokens, update.logprobs, strict=True)
            result["logprobs"] = self._logprobs[choice.index].render(entries)
        if self._shows_ids:
            result["token_ids"] = update.tokens
            if is_first:
                result["prompt_token_ids"] = choice.prompt.tokens
        return result

    def _prompt_text(self, choice: GeneratedChoice) -> str:
        if choice.prompt.text is not None:
            return choice.prompt.text
        tokens = choice.prompt.tokens
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens, self.body.skip_special_tokens)

    # --- streamed ---

    def frames(self, choice: GeneratedChoice) -> bytes:
        """The chunk of a choice's new output, with the finish reason at the end."""
        if self._is_plain:
            return self._text_frame(choice, choice.take_text())
        update = choice.take()
        if is_first := choice.index in self._unopened:
            self._unopened.discard(choice.index)
        if is_first or (self._has_details and update.tokens):
            details = self._details(choice, update, is_first)
            details["finish_reason"], details["stop_reason"] = choice.finish_reason, choice.stop_reason
            return self._frame.start + encode_line(details)[1:-1] + self._frame.end()
        return self._text_frame(choice, update.text)

    def _text_frame(self, choice: GeneratedChoice, text: str) -> bytes:
        if choice.finish_reason is not None:
            end = _ENDS % (encode(choice.finish_reason), encode_line(choice.stop_reason))
        elif text:
            end = _GOES_ON
        else:
            return b""
        return self._starts[choice.index] + encode_line(text) + end + self._frame.end()

    def last_frames(self) -> bytes:
        return self._frame.usage_chunk()


COMPLETION = Dialect(decoder, _translate, _without_effect)
