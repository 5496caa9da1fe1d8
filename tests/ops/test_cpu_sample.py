"""Compiled sampling: its parts against sorts and exact scores, whole rows against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo import ops
from octavo.ops.sampling.noise import exponentials, key_of, token_hashes
from octavo.ops.sampling.sampling import BANNED, SampleParams
from octavo_kernels.cpu import threads
from octavo_kernels.cpu.sampling import sample_row
from octavo_kernels.cpu.sampling.sample_row import BLOCK
from tests.ops.cpu_cases import needs_float_kernels
from tests.ops.sampling_cases import make_logits, mixed_params, uniform_params
from tests.tiers import one_in

pytestmark = needs_float_kernels
V = 9001
CPU = torch.device("cpu")
ONE, NEVER = np.float32(1), np.float32(-math.inf)


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(1)


@one_in(5)
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
@pytest.mark.parametrize(("R", "size"), [(200, 1), (200, 3), (200, BLOCK), (40, V)])
def test_rows_are_those_of_the_reference(R: int, size: int, kind: str, num_threads: int) -> None:
    logits_RV, params = make_logits(kind, R, size, torch.float32, seed=size), mixed_params(R, size, seed=size)
    if size > 3:
        logits_RV[::2, ::5] = BANNED
    assert ops.sample(logits_RV, params).tolist() == ops.sample.reference(logits_RV, params).tolist()


def test_little_of_a_flat_row_is_found_in_a_few_looks() -> None:
    """Almost all tokens are dropped, and each that is looked at drops those that are no likelier."""
    R = 300
    logits_RV = make_logits("flat", R, V, torch.float32) / 50
    few = uniform_params(R)._replace(top_p=torch.full((R,), 1e-3))
    assert ops.sample(logits_RV, few).tolist() == ops.sample.reference(logits_RV, few).tolist()


def test_negative_zero_is_zero() -> None:
    """Tokens of equal logits are kept or dropped together."""
    logits_RV = torch.tensor([[0.0, -0.0, -9.0]]).expand(200, 3).contiguous()
    params = uniform_params(200, top_p=0.4)
    found = ops.sample(logits_RV, params).tolist()
    assert found == ops.sample.reference(logits_RV, params).tolist()
    assert set(found) == {0, 1}


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 300.0])
def test_every_token_that_reaches_a_score_is_listed(scale: float) -> None:
    hashes_V, places = token_hashes(V, CPU), np.empty(V, np.int32)
    num_found = num_winners = 0
    for seed in range(20):
        logits_V = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * scale
        logits_V[seed::7] = BANNED
        scores_V = logits_V - exponentials(hashes_V, seed, 5 * seed).log_()
        reached = float(scores_V.sort().values[-(1 + 20 * (seed % 3))])
        key = sample_row.key_of(np.int64(seed), np.int32(5 * seed))
        assert key == key_of(seed, 5 * seed)
        hashes = hashes_V.numpy().astype(np.uint32)
        count = sample_row.list_possible(logits_V.numpy(), hashes, ONE, NEVER, key, np.float32(reached), places)
        found, winners = places[:count].tolist(), (scores_V >= reached).nonzero().squeeze(1).tolist()
        assert set(winners) <= set(found)
        assert found == sorted(found)
        num_found, num_winners = num_found + len(found), num_winners + len(winners)
    assert num_found < 1.2 * num_winners + 20


def test_the_smallest_bits_are_no_exception() -> None:
    """A hash that makes the bits of a variate zero gives the largest noise."""
    logits, hashes = np.zeros(3, np.float32), np.array([0, 5, 1 << 31], np.uint32)
    places, key = np.empty(3, np.int32), (np.uint32(1), np.uint32(0))
    count = sample_row.list_possible(logits, hashes, ONE, NEVER, key, np.float32(22.8), places)
    assert 0 in places[:count]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000])
def test_kth_largest(size: int) -> None:
    numbers = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    numbers[::3] = np.round(numbers[::3])
    for k in sorted({1, 2, 40, size // 2, size - 1, size} & set(range(1, size + 1))):
        assert sample_row.kth_largest(numbers, k) == np.sort(numbers)[-k]
        assert sample_row.kth_largest(np.sort(numbers), k) == np.sort(numbers)[-k]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK + 1, V])
def test_mass(size: int, temperature: float) -> None:
    logits = (np.random.default_rng(size).standard_normal(size) * 20).astype(np.float32)
    logits[1::9] = NEVER  # so that the division does not overflow
    x = logits / np.float32(temperature)
    logits[1::9] = BANNED
    for least in (NEVER, np.sort(x)[size // 2], x.max()):
        expected = np.exp(np.float64(x[x >= least]) - np.float64(x.max())).sum()
        assert sample_row.mass_from(logits, np.float32(temperature), x.max(), least) == pytest.approx(
            expected, rel=1e-6
        )


def test_greedy_rows_and_draws_share_a_call(num_threads: int) -> None:
    logits_RV = make_logits("flat", 50, V, torch.float32)
    params: SampleParams = uniform_params(50)
    params.temperature[::2] = 0
    found = ops.sample(logits_RV, params)
    assert torch.equal(found[::2], logits_RV[::2].argmax(1).int())
    assert len(set(found[1::2].tolist()) - set(logits_RV[1::2].argmax(1).tolist())) > 10
