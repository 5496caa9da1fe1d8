"""Requests that keep tokens out: banned sequences, allowed tokens, grammars, biases and ``min_tokens``, in one batch.

What each must give is worked out by a plain loop over the logits of transformers; both runners must give it, whatever
else is in the batch, through preemption, replay and drafts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.engine.engine import Engine
from octavo.engine.runner.step_encoder import ERRORS
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.sampling_params import SamplingParams
from octavo.steps.messages import NOTHING_LEFT
from octavo.types import Masks, Plan, Request
from tests.runtime.test_model_runner import VOCAB, Loaded, run, tokens_of
from tests.runtime.test_stream_runner import stream_engine, without_host
from tests.speculating import last_known, speculating

ENDS = (5, 96)
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cases(loaded: Loaded) -> list[tuple[Request, list[int]]]:
    """Requests, and what they must give."""
    return [(request, expected(loaded, request)) for request in some_requests(loaded)]


@pytest.fixture(autouse=True)
def reference_operations() -> Iterator[None]:
    with dispatch.only(REFERENCE):
        yield


class EveryThird:
    """A grammar: a token may follow the output so far if it leaves another remainder of 3 than the sum of all."""

    def prepare(self, request: Request) -> Future[Any]:
        ready: Future[Any] = Future()
        ready.set_result(True)
        return ready

    @staticmethod
    def allows(output: list[Any]) -> set[int]:
        return {token for token in range(VOCAB) if token % 3 != sum(output) % 3}

    def masks(self, plan: Plan) -> Masks:
        found = {}
        for item in plan:
            if item.samples and item.seq.grammar and not item.is_stale:
                output = item.seq.tokens[item.seq.num_prompt_tokens : item.settled_start + len(item.tokens)]
                outputs = [[*output, *item.drafts[:count]] for count in range(len(item.drafts) + 1)]
                found[item.seq.id] = [self.mask(some) for some in outputs]
        return found

    def mask(self, output: list[Any]) -> Any:
        allowed = self.allows(output)
        return np.packbits([token in allowed for token in range(VOCAB)], bitorder="little")


def expected(loaded: Loaded, request: Request) -> list[int]:
    """The greedy output of ``request``, by the definition of what it asks for."""
    params, output = request.params, list[int]()
    while len(output) < request.max_tokens:
        scores = loaded.logits([*request.prompt_tokens, *output])[-1].double().numpy().copy()
        out = {s[-1] for s in request.banned_sequences if ends_with(output, s[:-1])}
        if params.allowed_token_ids is not None:
            out |= set(range(VOCAB)) - set(params.allowed_token_ids)
        if params.grammar is not None:
            out |= set(range(VOCAB)) - EveryThird.allows(output)
        if len(output) < params.min_tokens:
            out |= set(request.eos_token_ids)
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        scores[sorted(out)] = -np.inf
        output.append(int(scores.argmax()))
        if output[-1] in request.eos_token_ids:
            break
    return output


def ends_with(output: list[int], tail: tuple[int, ...]) -> bool:
    return not tail or (len(output) >= len(tail) and tuple(output[-len(tail) :]) == tail)


def some_requests(loaded: Loaded) -> list[Request]:
    """Requests of every kind, with plain ones between them. What is banned is what would have been said."""
    rng, made = random.Random(6), list[Request]()
    for number in range(9):
        prompt = rng.choices(range(VOCAB), k=rng.choice([1, 3, 5, 17]))
        kind = number % 7
        params: dict[str, Any] = {"temperature": 0}
        said = loaded.greedy(prompt, NUM_TOKENS) if kind in (0, 1, 5) else []
        banned: tuple[tuple[int, ...], ...] = ()
        if kind in (0, 5):
            banned = (tuple(said[:1]), tuple(said[4:7]), tuple(prompt[-1:] + said[:1]), (1,) * 20)
        if kind == 1:
            banned = tuple(itertools.pairwise(said))
        if kind in (2, 5):
            params["allowed_token_ids"] = tuple({*rng.sample(range(VOCAB), 40), *ENDS, *said})
        if kind in (3, 5):
            params["grammar"] = "every third"
        if kind == 4:
            params |= {"logit_bias": {5: 100.0, 7: 99.0}, "min_tokens": 4}
        made.append(Request(number, prompt, SamplingParams(**params), NUM_TOKENS, number, ENDS, banned))
    return made


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain preempting": {"num_blocks": 16},
    "stream": {},
    "stream three ahead": {"depth": 3, "max_num_seqs": 5, "block_size": 16, "max_num_batched_tokens": 9},
    "stream preempting": {"num_blocks": 16},
    "plain with drafts": {"speculation": speculating(lambda seq: [last_known(seq), 3])},
    "stream with drafts, one by one": {"speculation": speculating(lambda seq: [last_known(seq), 3]), "depth": 1},
    "stream with drafts": {"speculation": speculating(lambda seq: [last_known(seq), 3])},
}


def with_grammars(engine: Engine) -> Engine:
    engine.grammars = EveryThird()
    return engine


@pytest.mark.parametrize("name", ENGINES)
def test_restricted_and_plain_rows_in_one_step(
    loaded: Loaded, cases: list[tuple[Request, list[int]]], name: str
) -> None:
    settings = ENGINES[name]
    make = loaded.engine if name.startswith("plain") else lambda **given: stream_engine(loaded, **given)
    engine = with_grammars(make(**settings))
    found = tokens_of(run(engine, [request for request, _ in cases]))
    assert found == {request.id: output for request, output in cases}
    if "num_blocks" in settings:
        assert engine.stats().num_preemptions > 0


def test_each_restriction_changes_the_output(loaded: Loaded, cases: list[tuple[Request, list[int]]]) -> None:
    """Else the comparison above would show nothing."""
    for request, output in cases:
        free = loaded.greedy(request.prompt_tokens, NUM_TOKENS)
        assert (output == free[: len(output)]) == (request.id % 7 == 6), request.id


@pytest.mark.parametrize("num_known", [1, 6])
def test_a_replayed_request_keeps_to_its_restrictions(
    loaded: Loaded, cases: list[tuple[Request, list[int]]], num_known: int
) -> None:
    some = [(r, output) for r, output in cases if len(output) > num_known]
    assert len(some) > 4
    replayed = [msgspec.structs.replace(r, output_tokens=output[:num_known]) for r, output in some]
    found = tokens_of(run(with_grammars(stream_engine(loaded)), replayed))
    assert found == {r.id: output[num_known:] for r, output in some}


def test_drawn_tokens_keep_to_them_too(loaded: Loaded) -> None:
    """Beside others and alone, drawn from what is left: the same tokens, and none that is out."""
    allowed, banned = (0, 9, 18, 27, 36, 45), ((9,), (18, 27), (18, 36))
    params = SamplingParams(temperature=2, allowed_token_ids=allowed)
    some = [Request(i, [i, 2], params, 20, seed=i, banned_sequences=banned) for i in range(4)]
    others = [Request(10 + i, [i, 3], SamplingParams(temperature=1), 9, seed=i) for i in range(2)]
    together = tokens_of(run(stream_engine(loaded), [*others, *some]))
    for request in some:
        output = together[request.id]
        assert output == tokens_of(run(loaded.engine(), [request]))[request.id]
        assert set(output) <= set(allowed) - {9}
        assert not {(18, 27), (18, 36)}.intersection(itertools.pairwise(output))
    pairs = {pair for r in some for pair in zip(together[r.id], together[r.id][1:], strict=False)}
    assert any(first == 18 for first, _ in pairs), "nothing was banned, for its beginning never came"


def test_words_of_one_token_need_no_host(loaded: Loaded) -> None:
    """Beside biases and penalties of the same tokens, and with as many of both as there may be."""
    said = loaded.greedy([1, 2], NUM_TOKENS)
    bias = dict.fromkeys((*said, *range(1000, 1290)), 100.0)
    penalties = {"repetition_penalty": 0.5, "presence_penalty": -2.0, "min_tokens": 4}
    banned = tuple((token,) for token in (*said, *range(2000, 2118)))
    kinds: list[dict[str, Any]] = [
        {},
        {"logit_bias": bias},
        penalties,
        {**penalties, "logit_bias": bias, "logprobs": 2},
    ]
    some = [
        Request(i, [1, 2], SamplingParams(temperature=i % 2, **kinds[i]), NUM_TOKENS, i, ENDS, banned) for i in range(4)
    ]
    some.append(Request(4, [1, 2], SamplingParams(temperature=0), NUM_TOKENS))
    found = tokens_of(run(without_host(stream_engine(loaded, depth=3)), some))
    assert found == {r.id: tokens_of(run(loaded.engine(), [r]))[r.id] for r in some}
    assert all(not set(said) & set(found[i]) for i in range(4))
    assert found[4] == said


def test_a_row_with_nothing_left_ends_alone(loaded: Loaded) -> None:
    stuck = Request(0, [1, 2], SamplingParams(temperature=0, allowed_token_ids=(7,)), 9, banned_sequences=((7, 7, 7),))
    other = Request(1, [3], SamplingParams(temperature=0), 9)
    found = run(stream_engine(loaded), [stuck, other])
    assert tokens_of(found) == {0: [7, 7], 1: loaded.greedy([3], 9)}
    assert found[0][-1].error == ERRORS[NOTHING_LEFT]
