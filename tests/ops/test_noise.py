"""Random numbers by hashing: fixed for ever, uniform, and independent in every direction."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.ops.sampling.noise import exponentials, token_hashes
from tests.tiers import one_in

CPU = torch.device("cpu")
HASHES = token_hashes(1000, CPU)


def lowbias32(x: int) -> int:
    """Wellons' function as he states it, in unsigned arithmetic."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def uniforms(seed: int, position: int) -> torch.Tensor:
    return 1 - torch.exp(-exponentials(HASHES, seed, position).double())


def test_hashes_are_those_of_the_published_function() -> None:
    assert HASHES.tolist() == [lowbias32(token) for token in range(1000)]


def test_values_never_change() -> None:
    """A replay by a later version must draw the same tokens."""
    expected = [1.6200, 0.5307, 0.9270, 0.2019]
    found = exponentials(HASHES[:4], 1234, 56)
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_token_has_the_same_value_among_others_and_alone() -> None:
    some = torch.tensor([900, 3])
    assert torch.equal(exponentials(HASHES[some], 7, 8), exponentials(HASHES, 7, 8)[some])


@one_in(2)
@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_values_are_uniform_along(along: str) -> None:
    if along == "tokens":
        values = torch.cat([uniforms(1, position) for position in range(100)])
    elif along == "positions":
        values = torch.stack([uniforms(1, position)[5] for position in range(5000)])
    else:
        values = torch.stack([uniforms(seed, 1)[5] for seed in range(5000)])
    counts = torch.histc(values, bins=50, min=0, max=1)
    expected = len(values) / 50
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 49 + 5 * math.sqrt(2 * 49)


@pytest.mark.parametrize(("seed", "position"), [(0, 1), (1, 0), (2**63, 0), (-1, 0), (0, 2**16)])
def test_neighbours_are_uncorrelated(seed: int, position: int) -> None:
    here, there = uniforms(0, 0), uniforms(seed, position)
    correlation = torch.corrcoef(torch.stack([here, there]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(1000)


def test_values_are_positive_and_finite_even_at_the_ends_of_the_range() -> None:
    every = torch.cat([exponentials(HASHES, seed, 0) for seed in range(200)])
    assert every.isfinite().all()
    assert (every > 0).all()
    # All 32-bit inputs at the ends: hash inputs run through offsets, so the extremes occur for some key.
    ends = torch.tensor([0, 2**32 - 1])
    assert all(exponentials(ends, seed, 1).isfinite().all() for seed in range(1000))


def test_products_stay_in_range_for_the_largest_factors() -> None:
    """Exact arithmetic of Python agrees with int64, for keys over the whole range."""
    from octavo.ops.sampling import noise

    for seed in (0, 1, 2**64 - 1, 2**63, 0xDEADBEEF, *range(1000, 1020)):
        key = noise._split_mix(noise._split_mix(seed) ^ 3)
        factor, offset = key >> 32 | 1, key % 2**32
        tokens = torch.tensor([0, 1, 2**31, 2**32 - 1])
        bits = [lowbias32((token * factor + offset) % 2**32) for token in tokens.tolist()]
        expected = [-math.log1p(-min((b + 0.5) / 2**32, 1 - 2**-24)) for b in bits]
        assert exponentials(tokens, seed, 3).tolist() == pytest.approx(expected, rel=1e-4)
