"""Rules of acceptance: distributions over a small vocabulary, and rates."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import ops
from octavo.ops.sampling import noise
from octavo.ops.sampling.sampling import SampleParams
from octavo.runtime.drafting.optional_acceptance import (
    DRAFT_STREAM,
    RESIDUAL_STREAM,
    acceptance_rate,
    distribution,
    probabilities,
    rule,
    synthetic,
    verified,
)
from tests.tiers import one_in

NUM_DRAWS = 131_072
TARGET = torch.tensor([0.1, 0.6, 0.3])


def params(count: int, temperature: float = 1.0, position: int = 7) -> SampleParams:
    return SampleParams(
        torch.full((count,), temperature),
        torch.zeros(count),
        torch.zeros(count, dtype=torch.int32),
        torch.ones(count),
        torch.arange(count) * 0x1234567 - 2**40,
        torch.full((count,), position, dtype=torch.int32),
    )


def assert_distributed(tokens: torch.Tensor, want: torch.Tensor) -> None:
    count = len(tokens)
    shares = torch.bincount(tokens.long(), minlength=len(want)) / count
    for share, chance in zip(shares.tolist(), want.tolist(), strict=True):
        assert abs(share - chance) <= 4 * math.sqrt(max(chance * (1 - chance), 1e-12) / count) + 1e-9


def drawn(probs: torch.Tensor, given: SampleParams) -> torch.Tensor:
    """What ``ops.sample`` draws, without a look at each row."""
    return (probs / noise.row_exponentials(len(probs), given.seed, given.position)).argmax(dim=1)


def of_target(temperature: float) -> torch.Tensor:
    return TARGET if temperature else torch.tensor([0.0, 1.0, 0.0])


def test_draws_are_those_of_sampling() -> None:
    given = params(500)
    assert torch.equal(drawn(TARGET, given), ops.sample(TARGET.log().repeat(500, 1), given).long())


@one_in(3)
@pytest.mark.parametrize("draft", [[0.1, 0.6, 0.3], [0.8, 0.1, 0.1], [0.0, 0.0, 1.0], [1 / 3] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_drafts_keep_the_distribution(draft: list[float], temperature: float) -> None:
    """Drafts are drawn with noise of their own, as a drafter does."""
    given, draft_V, want = params(NUM_DRAWS, temperature), torch.tensor(draft), of_target(temperature)
    probs_RV = probabilities(TARGET.log().repeat(NUM_DRAWS, 1), given)
    drafts_R = drawn(draft_V, given._replace(position=given.position + DRAFT_STREAM))
    tokens_R = verified(probs_RV, given, drafts_R, draft_V.repeat(NUM_DRAWS, 1))
    assert_distributed(tokens_R, want)
    assert float((tokens_R == drafts_R).float().mean()) >= float(torch.minimum(want, draft_V).sum()) - 0.01


@pytest.mark.parametrize("draft", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_certain_drafts_keep_the_distribution(draft: int, temperature: float) -> None:
    given = params(NUM_DRAWS, temperature)
    probs_RV = probabilities(TARGET.log().repeat(NUM_DRAWS, 1), given)
    tokens_R = verified(probs_RV, given, torch.full((NUM_DRAWS,), draft))
    assert_distributed(tokens_R, of_target(temperature))


def test_noise_that_is_used_twice_would_be_noticed() -> None:
    """Drafts drawn with the residual's noise bias the result: the streams differ for a reason."""
    given, draft_V = params(NUM_DRAWS), torch.tensor([0.8, 0.1, 0.1])
    probs_RV = probabilities(TARGET.log().repeat(NUM_DRAWS, 1), given)
    drafts_R = drawn(draft_V, given._replace(position=given.position + RESIDUAL_STREAM))
    tokens_R = verified(probs_RV, given, drafts_R, draft_V.repeat(NUM_DRAWS, 1))
    with pytest.raises(AssertionError):
        assert_distributed(tokens_R, TARGET)


def test_exact_acceptance_is_sampling_itself() -> None:
    """With the same noise, drafts of a distribution close to the target's are nearly always accepted."""
    assert rule("exact", None, 3) is None
    tokens_R = drawn(TARGET, params(NUM_DRAWS))
    assert_distributed(tokens_R, TARGET)
    close = drawn(torch.tensor([0.15, 0.55, 0.3]), params(NUM_DRAWS))
    assert float((close == tokens_R).float().mean()) > 0.9


def test_rows_without_drafts_are_sampled() -> None:
    logits_RV, given = TARGET.log().repeat(100, 1), params(100)
    plain_R = ops.sample(logits_RV, given)
    assert torch.equal(distribution(logits_RV, given, torch.full((100,), -1)), plain_R)
    logits_RV[3] = math.nan
    found_R = distribution(logits_RV, given, torch.ones(100, dtype=torch.int64))
    assert found_R[3] == ops.sample(logits_RV, given)[3]
    assert found_R[3] < 0
    assert (torch.cat((found_R[:3], found_R[4:])) >= 0).all()


def test_probabilities_are_those_that_sampling_draws_from() -> None:
    torch.manual_seed(0)
    R, V = 20, 12
    logits_RV = torch.randn(1, V).repeat(R, 1) * 2
    given = SampleParams(
        torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(5),
        torch.tensor([0.0, 0.05, 0.3, 0.0, 0.2]).repeat(4),
        torch.tensor([0, 3, 5, 0, 12, 1, 4, 20, 0, 6], dtype=torch.int32).repeat(2),
        torch.tensor([1.0, 0.9, 0.5, 0.3, 0.99, 1.0, 0.7, 0.2, 1.0, 0.8]).repeat(2),
        torch.zeros(R, dtype=torch.int64),
        torch.zeros(R, dtype=torch.int32),
    )
    found_RV = probabilities(logits_RV, given)
    for r in range(0, R, 2):
        many = 800
        row = SampleParams(*(column[r : r + 1].repeat(many) for column in given))
        row = row._replace(seed=torch.arange(many))
        tokens = ops.sample(logits_RV[r : r + 1].repeat(many, 1), row)
        shares = torch.bincount(tokens.long(), minlength=V) / many
        assert (found_RV[r] - shares).abs().max() < 4 * 0.5 / math.sqrt(many)
        assert ((found_RV[r] > 1e-2) <= (shares > 0)).all()
        assert ((shares > 0) <= (found_RV[r] > 0)).all()


def test_noise_of_rows_is_that_of_sampling() -> None:
    seeds, positions = torch.tensor([0, 5, -1, -(2**63), 2**63 - 1]), torch.tensor([0, 1, 77, 2**30 + 5, 9])
    found_RV = noise.row_exponentials(9, seeds, positions.int())
    hashes_V = noise.token_hashes(9, torch.device("cpu"))
    for row, seed, position in zip(found_RV, seeds.tolist(), positions.tolist(), strict=True):
        assert torch.equal(row, noise.exponentials(hashes_V, seed % 2**64, position))


@pytest.mark.parametrize(("length", "num_drafts"), [(2.6, 3), (1.0, 4), (5.0, 4)])
def test_synthetic_acceptance_has_the_length_asked_for(length: float, num_drafts: int) -> None:
    rate = acceptance_rate(length, num_drafts)
    count = 1_500
    logits_RV, total, survives = TARGET.log().repeat(count, 1), torch.ones(count), torch.ones(count, dtype=torch.bool)
    drafts_R = torch.ones(count, dtype=torch.int64)
    for position in range(num_drafts):
        survives &= synthetic(logits_RV, params(count, position=position), drafts_R, rate) == drafts_R
        total += survives
    assert abs(float(total.mean()) - length) < 0.2
