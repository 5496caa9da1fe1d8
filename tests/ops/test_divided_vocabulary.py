"""Sampling from candidates of ranks: the token that is chosen from all logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.sampling.divided_vocabulary import MOST, UNDECIDED, choose_tokens, find_candidates
from octavo.ops.sampling.noise import token_hashes
from octavo.ops.sampling.sampling import BANNED, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE, OVERFLOWN, SampleParams
from octavo.quant.stored.shard import Shard

CPU = torch.device("cpu")


def params(rows: list[tuple[float, float, int, float]]) -> SampleParams:
    temperature, min_p, top_k, top_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    count = torch.arange(len(rows))
    return SampleParams(
        temperature.float(), min_p.float(), top_k.int(), top_p.float(), count * 7 + 1, (count * 3).int()
    )


def chosen(logits_RV: Tensor, asked: SampleParams, size: int) -> list[int]:
    hashes = token_hashes(logits_RV.shape[1], CPU)
    found = []
    for rank in range(size):
        own = Shard(rank, size).tokens(logits_RV.shape[1])
        part = slice(own.start, own.stop)
        found.append(find_candidates(logits_RV[:, part].contiguous(), asked, hashes[part], own.start))
    return choose_tokens(torch.stack(found), asked, hashes).tolist()


KINDS = [
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 0, 1.0),
    (0.8, 0.0, 5, 1.0),
    (1.3, 0.05, 0, 1.0),
    (0.9, 0.0, 0, 0.9),
    (1.0, 0.02, 40, 0.95),
    (0.5, 0.0, 1, 0.5),
    (1.0, 0.0, 10_000, 1.0),
]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [97, 3001])
def test_the_same_tokens_as_from_all_logits(size: int, vocab_size: int) -> None:
    torch.manual_seed(vocab_size + size)
    asked = params(KINDS * 20)
    logits_RV = torch.randn(len(KINDS) * 20, vocab_size) * 4
    logits_RV[::3] = logits_RV[::3].round()  # ties
    logits_RV[::4, : vocab_size // 2] = BANNED
    expected = ops.sample(logits_RV.clone(), asked).tolist()
    found = chosen(logits_RV, asked, size)
    undecided = [kind for kind, token in zip(KINDS * 20, found, strict=True) if token == UNDECIDED]
    assert [(e if f == UNDECIDED else f) for e, f in zip(expected, found, strict=True)] == expected
    assert len(undecided) < len(found) / 4
    if vocab_size < MOST:
        assert not undecided


def test_a_flat_distribution_is_not_decided_by_candidates() -> None:
    asked = params([(1.0, 0.0, 0, 0.99), (1.0, 0.0, 2 * MOST + 50, 1.0), (1.0, 1e-6, 0, 1.0), (1.0, 0.0, 0, 1.0)])
    found = chosen(torch.randn(4, 5000) * 0.01, asked, 2)
    assert found[:3] == [UNDECIDED] * 3
    assert found[3] >= 0


@pytest.mark.parametrize("kind", [(0.0, 0.0, 0, 1.0), (1.0, 0.0, 0, 1.0), (1.0, 0.0, 5, 0.9)])
def test_rows_without_a_token_say_why(kind: tuple[float, float, int, float]) -> None:
    logits_RV = torch.randn(5, 64)
    logits_RV[0, 63] = math.nan
    logits_RV[1, 2] = math.inf
    logits_RV[2] = BANNED
    logits_RV[3, 50] = OVERFLOWN
    logits_RV[4, :40] = BANNED
    asked = params([kind] * 5)
    found = chosen(logits_RV, asked, 4)
    assert found[:4] == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE]
    assert found == ops.sample(logits_RV.clone(), asked).tolist()


def test_a_small_temperature_can_leave_the_range() -> None:
    asked = params([(1e-4, 0.0, 0, 1.0), (1e-4, 0.0, 3, 1.0)])
    logits_RV = torch.full((2, 32), 3e37)
    logits_RV[:, 9] = 3.2e37
    assert chosen(logits_RV, asked, 2) == ops.sample(logits_RV.clone(), asked).tolist() == [OUT_OF_RANGE] * 2
