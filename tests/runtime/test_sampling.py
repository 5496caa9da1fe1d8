"""The sampler: greedy, the distribution of its draws, their independence, and rows that go wrong alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.sampling_params import SamplingParams
from octavo_kernels.cpu.sampling import sample as sample
from tests.ops.row_sampler import NOT_NUMBERS, NOTHING_LEFT, OVERFLOW, Row
from tests.runtime.row_runner import RowRunner
from tests.tiers import one_in

VOCAB = 64
SAMPLER = RowRunner(VOCAB)


def row(
    position: int = 5, seed: int = 0, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), mask: Any = None, **params: Any
) -> Row:
    """A row of a sequence with a prompt of 3 tokens; 9 and 63 end it."""
    return Row(SamplingParams(**params), seed, position, [*tokens], 3, frozenset({9, 63, 1000}), mask)


def logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draws(scores: torch.Tensor, count: int, first_position: int = 5, seed: int = 0, **params: Any) -> list[int]:
    rows = [row(first_position + i, seed, **params) for i in range(count)]
    return [choice.token for choice in SAMPLER.sample(scores.expand(count, VOCAB), rows)]


def expected_distribution(scores: torch.Tensor, **params: Any) -> np.ndarray[Any, Any]:
    """Steps 7 to 10 in float64."""
    p = SamplingParams(**params)
    x = scores.double().numpy() / p.temperature
    weights = np.exp(x - x.max())
    weights[weights < p.min_p * weights.max()] = 0
    if p.top_k:
        weights[np.argsort(-weights)[p.top_k :]] = 0
    weights /= weights.sum()
    order = np.argsort(-weights)
    count = int(np.sum(np.cumsum(weights[order]) < p.top_p)) + 1
    weights[order[count:]] = 0
    return weights / weights.sum()


def test_greedy_takes_the_most_likely_and_of_equals_the_first() -> None:
    scores = logits(3)
    scores[2] = 0
    scores[2, [7, 30]] = 5
    found = SAMPLER.sample(scores, [row(temperature=0)] * 3)
    assert [choice.token for choice in found] == [int(scores[0].argmax()), int(scores[1].argmax()), 7]


@one_in(5)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_distribution(params: dict[str, Any], over: str) -> None:
    scores, count = logits(1)[0], 3000
    if over == "positions":
        rows = [row(5 + i, **params) for i in range(count)]
    else:
        rows = [row(5, seed=i, **params) for i in range(count)]
    tokens = [choice.token for choice in SAMPLER.sample(scores.expand(count, VOCAB), rows)]
    expected = expected_distribution(scores, **params) * count
    observed = np.bincount(tokens, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * max(freedom, 1))


def test_draws_of_different_seeds_are_independent() -> None:
    scores, count = torch.zeros(VOCAB), 3000
    first, second = draws(scores, count, seed=1), draws(scores, count, seed=2)
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert abs(same - count / VOCAB) < 5 * math.sqrt(count / VOCAB)
    following = sum(a == b for a, b in itertools.pairwise(first))
    assert abs(following - count / VOCAB) < 5 * math.sqrt(count / VOCAB)


def test_a_row_gives_the_same_alone_and_in_any_batch() -> None:
    scores = logits(12)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 3, "logprobs": 4},
        {"temperature": 0, "repetition_penalty": 1.5, "logprobs": 0},
        {"frequency_penalty": 1.0, "min_tokens": 6, "logit_bias": {5: 3.0}},
    ]
    rows = [row(5, seed=i, **kinds[i % 6]) for i in range(12)]
    together = SAMPLER.sample(scores, rows)
    alone = [SAMPLER.sample(scores[i : i + 1], rows[i : i + 1])[0] for i in range(12)]
    backwards = SAMPLER.sample(scores.flip(0), rows[::-1])[::-1]
    assert [c.token for c in together] == [c.token for c in alone] == [c.token for c in backwards]
    for a, b in zip(together, alone, strict=True):
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs and b.logprobs:
            assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-6)
            assert a.logprobs.top_ids == b.logprobs.top_ids


def test_min_tokens_bans_what_ends_the_text_until_there_are_enough() -> None:
    scores = torch.zeros(1, VOCAB)
    scores[0, 9], scores[0, 63], scores[0, 8] = 9, 8, 1
    for position, expected in ((3, 8), (6, 8), (7, 9)):
        found = SAMPLER.sample(scores, [row(position, temperature=0, min_tokens=4, max_tokens=20)])
        assert found[0].token == expected


def test_penalties_see_the_prompt_only_where_they_should() -> None:
    """Tokens 1, 2, 3 are the prompt, 4 and 5 the output; what lies beyond the position is not looked at."""
    tokens = (1, 2, 3, 4, 5, 6, 7)
    scores = torch.ones(1, VOCAB)
    scores[0, [1, 4, 6]] = torch.tensor([1.3, 1.2, 1.1])
    by_output = SAMPLER.sample(scores, [row(5, tokens=tokens, temperature=0, presence_penalty=1.0)])
    by_all = SAMPLER.sample(scores, [row(5, tokens=tokens, temperature=0, repetition_penalty=2.0)])
    assert (by_output[0].token, by_all[0].token) == (1, 6)
    scores[0, 1] = 0
    assert SAMPLER.sample(scores, [row(5, tokens=tokens, temperature=0, frequency_penalty=1.0)])[0].token == 6


def test_mask_comes_first_and_bias_does_not_undo_it() -> None:
    mask = np.zeros(8, dtype=np.uint8)
    mask[2] = 0b11  # tokens 16 and 17
    found = SAMPLER.sample(torch.zeros(1, VOCAB), [row(mask=mask, temperature=0, logit_bias={17: 1.0, 40: 100.0})])
    assert found[0].token == 17


def test_logprobs_are_of_the_models_own_distribution() -> None:
    scores = logits(2)
    params: dict[str, Any] = {"temperature": 0.1, "top_k": 1, "logit_bias": {int(scores[0].argmin()): 100.0}}
    found = SAMPLER.sample(scores, [row(logprobs=3, **params), row(logprobs=0, temperature=0)])
    own = scores.double().log_softmax(-1)
    unlikely, likely = found[0].logprobs, found[1].logprobs
    assert unlikely is not None
    assert likely is not None
    assert (unlikely.token_id, unlikely.rank) == (int(scores[0].argmin()), VOCAB)
    assert unlikely.logprob == pytest.approx(float(own[0].min()), abs=1e-5)
    assert unlikely.top_ids == own[0].topk(3).indices.tolist()
    assert unlikely.top_logprobs == pytest.approx(own[0].topk(3).values.tolist(), abs=1e-5)
    assert (likely.rank, likely.top_ids, likely.top_logprobs) == (1, [], [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_bad_row_fails_alone(bad: float, temperature: int) -> None:
    scores = logits(3)
    expected = [choice.token for choice in SAMPLER.sample(scores, [row(temperature=temperature, logprobs=1)] * 3)]
    scores[1, 40] = bad
    found = SAMPLER.sample(scores, [row(temperature=temperature, logprobs=1)] * 3)
    assert [choice.error for choice in found] == [None, NOT_NUMBERS, None]
    assert [found[0].token, found[2].token] == [expected[0], expected[2]]
    assert found[1].logprobs is None


def test_a_row_with_nothing_allowed_or_out_of_range_is_an_error() -> None:
    nothing = row(mask=np.zeros(8, dtype=np.uint8))
    overflow = row(repetition_penalty=0.001, top_p=0.5)
    found = SAMPLER.sample((logits(2).abs() + 1) * 1e36, [nothing, overflow])
    assert [choice.error for choice in found] == [NOTHING_LEFT, OVERFLOW]


def test_ids_beyond_the_vocabulary_do_nothing() -> None:
    scores = logits(1)
    strange = row(tokens=(1, 2, 3, 4, 100000), temperature=0, logit_bias={VOCAB: 100.0}, presence_penalty=0.1)
    assert SAMPLER.sample(scores, [strange])[0].token == int(scores.argmax())


def test_greedy_rows_need_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "sample_task", lambda: pytest.fail("a greedy row was drawn"))
    SAMPLER.sample(logits(4), [row(temperature=0, min_tokens=1, logprobs=1)] * 4)


def bits(*tokens: int) -> Any:
    mask = np.zeros(VOCAB // 8, dtype=np.uint8)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return mask


def test_a_complete_grammar_ends_a_text_before_min_tokens() -> None:
    """While it allows something else, the tokens that end the text are out; then nothing else is left."""
    scores = torch.zeros(1, VOCAB)
    scores[0, 9] = 50
    going_on = row(mask=bits(9, 20), min_tokens=10, temperature=0)
    complete = row(mask=bits(9, 63), min_tokens=10, temperature=0)
    assert [SAMPLER.sample(scores, [each])[0].token for each in (going_on, complete)] == [20, 9]


def test_where_a_grammar_allows_nothing_the_row_fails_alone() -> None:
    found = SAMPLER.sample(torch.zeros(2, VOCAB), [row(mask=bits(), min_tokens=10), row()])
    assert [choice.error for choice in found] == [NOTHING_LEFT, None]


def banning(*sequences: tuple[int, ...], **changes: Any) -> Row:
    """A row whose output so far is 4, 5, after a prompt that ends with 3."""
    return replace(row(temperature=0, **changes), banned_sequences=sequences)


@pytest.mark.parametrize(
    ("sequence", "is_out"),
    [((20,), True), ((5, 20), True), ((4, 5, 20), True), ((3, 4, 5, 20), False), ((4, 20), False), ((5, 21), False)],
)
def test_the_last_token_of_a_banned_sequence_is_out_behind_its_others(sequence: tuple[int, ...], is_out: bool) -> None:
    """The prompt is no part of a sequence."""
    scores = torch.zeros(1, VOCAB)
    scores[0, 20], scores[0, 30] = 2, 1
    (found,) = SAMPLER.sample(scores, [banning(sequence, (1, 2), (5, 5, 5))])
    assert found.token == (30 if is_out else 20)


def test_only_allowed_tokens_are_chosen_and_logprobs_do_not_care() -> None:
    scores = logits(1)
    best = scores[0].argsort(descending=True).tolist()
    allowed = row(temperature=0, logprobs=1, allowed_token_ids=(best[5], best[9], VOCAB + 3, best[5]))
    (found,) = SAMPLER.sample(scores, [allowed])
    assert found.token == best[5]
    assert found.logprobs is not None
    assert (found.logprobs.rank, found.logprobs.top_ids) == (6, best[:1])


def test_a_bias_does_not_bring_back_what_is_out() -> None:
    both = banning((20,), allowed_token_ids=(20, 30, 40), logit_bias={20: 100.0, 50: 100.0, 40: 1.0})
    assert SAMPLER.sample(torch.zeros(1, VOCAB), [both])[0].token == 40


def test_a_complete_grammar_ends_a_text_whatever_else_is_asked() -> None:
    scores = torch.zeros(1, VOCAB)
    ended = banning((9,), mask=bits(9, 63), allowed_token_ids=(20,), min_tokens=10)
    going_on = banning((9,), mask=bits(9, 20, 30), allowed_token_ids=(9, 30))
    assert [SAMPLER.sample(scores, [each])[0].token for each in (ended, going_on)] == [9, 30]
