"""Each processor against a simple float64 computation in numpy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.ops import processors

VOCAB = 500
Floats = npt.NDArray[np.float64]


@pytest.fixture
def row() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept(found: torch.Tensor, row: torch.Tensor) -> set[int]:
    """The tokens that are left, after checking that the others are out and nothing else changed."""
    left = found > -math.inf
    assert torch.equal(found[left], row[left])
    return set(left.nonzero().flatten().tolist())


def test_mask_is_read_from_the_lowest_bit_and_ends_where_it_ends(row: torch.Tensor) -> None:
    allowed = {0, 1, 7, 8, 255, 391}
    mask = np.zeros(50, dtype=np.uint8)  # covers 400 of 500 tokens
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    assert kept(processors.apply_mask(row, mask), row) == allowed
    longer = np.concatenate([mask, np.zeros(50, dtype=np.uint8)])
    assert kept(processors.apply_mask(row, longer), row) == allowed


def test_ban_passes_over_ids_that_do_not_exist(row: torch.Tensor) -> None:
    assert kept(processors.ban(row, [3, VOCAB, 2**31 - 1, 499]), row) == set(range(VOCAB)) - {3, 499}


def test_bias(row: torch.Tensor) -> None:
    expected = row.double().numpy()
    expected[7] += 2.5
    expected[499] -= 100
    np.testing.assert_allclose(processors.add_bias(row, {7: 2.5, 499: -100.0, VOCAB: 50.0}), expected, rtol=1e-6)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_counts_a_token_once(row: torch.Tensor, penalty: float) -> None:
    tokens = [1, 1, 1, 4, 9, 9, VOCAB + 4]
    expected = row.double().numpy()
    for token in {1, 4, 9}:
        expected[token] = expected[token] / penalty if expected[token] > 0 else expected[token] * penalty
    np.testing.assert_allclose(processors.penalize_repetition(row, tokens, penalty), expected, rtol=1e-6)


def test_frequency_and_presence_penalties(row: torch.Tensor) -> None:
    expected = row.double().numpy()
    expected[1] -= 3 * 0.7 + 0.2
    expected[4] -= 0.7 + 0.2
    found = processors.penalize_output(row, [1, 4, 1, 1, VOCAB], frequency=0.7, presence=0.2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("min_p", [1e-6, 0.05, 0.6, 1.0])
def test_min_p(row: torch.Tensor, min_p: float) -> None:
    probabilities = softmax(row.double().numpy())
    expected = set(np.flatnonzero(probabilities >= min_p * probabilities.max()).tolist())
    assert kept(processors.keep_min_p(row, min_p), row) == expected


@pytest.mark.parametrize("k", [1, 2, 77, VOCAB, VOCAB + 1])
def test_top_k(row: torch.Tensor, k: int) -> None:
    assert kept(processors.keep_top_k(row, k), row) == set(np.argsort(-row.numpy())[:k].tolist())


def test_top_k_keeps_what_is_as_good_as_the_last() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 3.0, 0.0])
    assert kept(processors.keep_top_k(row, 2), row) == {1, 2, 3}


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999999])
def test_top_p(row: torch.Tensor, top_p: float, scale: float) -> None:
    row = row * scale
    probabilities = softmax(row.double().numpy())
    order = np.argsort(-probabilities)
    count = int(np.sum(np.cumsum(probabilities[order]) < top_p)) + 1
    assert kept(processors.keep_top_p(row, top_p), row) == set(order[:count].tolist())


def test_top_p_is_of_what_earlier_steps_left() -> None:
    row = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    row[0] = -math.inf
    assert kept(processors.keep_top_p(row, 0.49), row) == {1}
    assert kept(processors.keep_top_p(row, 0.51), row) == {1, 2, 3}


def test_inputs_are_left_alone(row: torch.Tensor) -> None:
    before = row.clone()
    processors.apply_mask(row, np.zeros(63, dtype=np.uint8))
    processors.ban(row, [1])
    processors.add_bias(row, {1: 1.0})
    processors.penalize_repetition(row, [1], 2.0)
    processors.penalize_output(row, [1], 1.0, 1.0)
    processors.keep_min_p(row, 0.5)
    processors.keep_top_k(row, 1)
    processors.keep_top_p(row, 0.5)
    assert torch.equal(row, before)


@pytest.mark.parametrize("tokens", [[], [VOCAB]])
def test_penalties_over_no_known_token_change_nothing(row: torch.Tensor, tokens: list[int]) -> None:
    assert torch.equal(processors.penalize_repetition(row, tokens, 2.0), row)
    assert torch.equal(processors.penalize_output(row, tokens, 1.0, 1.0), row)
