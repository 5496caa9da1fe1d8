"""Beam search over HTTP, in vLLM's form: ``use_beam_search``, with ``n`` as the width of the beam."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from octavo.engine.beam_search import MAX_BEAM_WIDTH, BeamSearch, BeamSearchParams, BeamSearchSequence
from octavo.errors import DeadlineExceeded, InvalidParameter
from octavo.sampling_params import DEFAULTS
from octavo.text.tokenizer import end_tokens
from octavo_server.admission import Admission, ClientRequest
from octavo_server.dialects.openai.common_fields import GenerationFields
from octavo_server.generation import GeneratedChoice, Prompt
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.request_body import GATHERED
from octavo_server.http.response import finished_choices
from octavo_server.tenants.api_keys import Account

IRRELEVANT = ("temperature", "top_p", "top_k", "min_p", "seed", "num_speculative_tokens", "stream_options")
"""Fields without an effect, since nothing is sampled."""
_HONOURED = {
    *("model", "prompt", "max_tokens", "n", "use_beam_search", "length_penalty", "ignore_eos", "add_special_tokens"),
    *("priority", "cache_salt", "user", "prompt_cache_key", "prompt_cache_retention", "ttft_target", "tpot_target"),
    *("session_id", "timeout", "return_token_ids", "skip_special_tokens"),
}


class FoundBeams(NamedTuple):
    """What was found for one prompt."""

    prompt: Prompt
    sequences: list[BeamSearchSequence]
    """Best first."""


class BeamCandidate(NamedTuple):
    """A token that may come next."""

    logprob: float


def check_fields(body: GenerationFields) -> None:
    """Raise ``UnsupportedParameter`` for a field of a completion that a beam search does not honour."""
    for field in msgspec.structs.fields(body):
        if field.name in _HONOURED or field.name in IRRELEVANT or field.name == GATHERED:
            continue
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if getattr(body, field.name) != default:
            raise _unsupported(field.name)
    for name, value in body.sampling.items():
        if name not in _HONOURED and name not in IRRELEVANT and value != DEFAULTS[name]:
            raise _unsupported(name)


def _unsupported(name: str) -> UnsupportedParameter:
    return UnsupportedParameter(name, f"'{name}' is not supported with 'use_beam_search'.")


async def search_beams(
    admission: Admission, submitted: ClientRequest, length_penalty: float, time_limit: float | None, request: Request
) -> list[FoundBeams]:
    """The best ``params.n`` continuations of each prompt of ``submitted``. Raises ``RequestError``, ``ClientGone``."""
    width = submitted.params.n
    if width > MAX_BEAM_WIDTH:
        message = f"'n', which is the width of the beam with 'use_beam_search', must be at most {MAX_BEAM_WIDTH}."
        raise InvalidParameter("n", message)
    field, searches = submitted.prompt_field, list[BeamSearch]()
    adds_special, caller = submitted.add_special_tokens, submitted.caller
    prompts = [await admission.encode(source, field, adds_special, caller) for source in submitted.prompts]
    for prompt in prompts:
        params = BeamSearchParams(width, admission.max_tokens(submitted, prompt), length_penalty=length_penalty)
        ends = end_tokens(submitted.params, admission.tokenizer, admission.engine.info)
        searches.append(BeamSearch(prompt.tokens, ends, params))
    try:
        async with asyncio.timeout(time_limit):
            await _advance_all(admission, submitted, searches, request)
    except TimeoutError:
        raise DeadlineExceeded(time_limit or 0.0) from None
    return [FoundBeams(prompt, search.best()) for prompt, search in zip(prompts, searches, strict=True)]


async def _advance_all(
    admission: Admission, submitted: ClientRequest, searches: list[BeamSearch], request: Request
) -> None:
    """Advance every search to its end; in each step every beam is a request for one token."""
    # Ends of texts are for the search to judge, so no request may end by itself.
    params = msgspec.structs.replace(searches[0].params.one_token(), ignore_eos=True)
    step = dataclasses.replace(submitted, params=params, timeout=None)
    account = submitted.caller.account
    for length in range(max(search.params.max_tokens for search in searches)):
        active = [search for search in searches if search.beams and length < search.params.max_tokens]
        if not active:
            break
        beams = [beam.tokens for search in active for beam in search.beams]
        choices = await finished_choices(await admission.admit(dataclasses.replace(step, prompts=beams)), request)
        if length == 0:  # later steps count neither as requests nor as prompts
            step = dataclasses.replace(step, caller=dataclasses.replace(submitted.caller, account=Account()))
        else:
            account.charge(len(beams))
        candidates = iter([_candidates(choice) for choice in choices])
        for search in active:
            search.advance([next(candidates) for _ in search.beams])


def _candidates(choice: GeneratedChoice) -> Mapping[int, BeamCandidate]:
    """The likeliest tokens that may come next."""
    (entry,) = choice.take().logprobs
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {token: BeamCandidate(logprob) for token, logprob in pairs}
