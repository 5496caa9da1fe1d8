"""Beam search over the engine of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from octavo.engine.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence
from octavo.errors import RequestFailed
from octavo.llm.live_requests import LiveRequests
from octavo.llm.outputs import Logprob
from octavo.llm.prompts import Checked
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer


@dataclass
class BeamSearchOutput:
    """The sequences found for one prompt, best first."""

    sequences: list[BeamSearchSequence]


def search_beams(
    requests: LiveRequests,
    prompts: Sequence[Checked],
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
    advance: Callable[[int], None],
) -> list[BeamSearchOutput]:
    """Search for the best continuations of all prompts at once; ``advance`` is called with 1 after each step.

    Raises ``RequestFailed`` if the engine fails on a beam.
    """
    searches = [BeamSearch(prompt.tokens, prompt.eos_token_ids, params) for prompt in prompts]
    for _ in range(params.max_tokens):
        if not (unfinished := [search for search in searches if search.beams]):
            break
        beams = [beam for search in unfinished for beam in search.beams]
        candidates = iter(_next_tokens(requests, [beam.tokens for beam in beams], params.one_token()))
        for search in unfinished:
            search.advance([next(candidates) for _ in search.beams])
        advance(1)
    outputs = [BeamSearchOutput(search.best()) for search in searches]
    if tokenizer is not None:
        for sequence in (sequence for output in outputs for sequence in output.sequences):
            sequence.text = tokenizer.decode(sequence.tokens)
    return outputs


def _next_tokens(
    requests: LiveRequests, beams: Collection[list[int]], params: SamplingParams
) -> list[dict[int, Logprob]]:
    """The log-probabilities of the likeliest tokens behind each beam."""
    jobs = [requests.make("", Checked(None, tokens, params, 1, (), ())) for tokens in beams]
    with requests.submitted(jobs) as unfinished:
        while unfinished.count:
            requests.step(unfinished)
    outputs = [job.continuations[0].output() for job in jobs]
    for output in outputs:
        if not output.logprobs:
            raise RequestFailed(output.error or "The engine gave no log-probabilities.")
    return [output.logprobs[0] for output in outputs if output.logprobs]
