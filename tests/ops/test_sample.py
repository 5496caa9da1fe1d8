"""The reference of ``ops.sample`` against the sampler."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import ops
from octavo.ops.sampling.sampling import BANNED, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE, OVERFLOWN
from tests.ops.sampling_cases import by_sampler, make_logits, mixed_params, part_of, uniform_params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_same_tokens_as_the_sampler(kind: str, dtype: torch.dtype) -> None:
    logits_RV = make_logits(kind, 400, 777, dtype)
    params = mixed_params(400, 777)
    found = ops.sample(logits_RV, params)
    assert found.dtype == torch.int32
    assert found.tolist() == by_sampler(logits_RV, params)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite(bad: float) -> None:
    logits_RV = make_logits("flat", 3, 50, torch.float32)
    logits_RV[1, 49] = bad
    for temperature in (0.0, 1.0):
        params = uniform_params(3, temperature=temperature)
        found = ops.sample(logits_RV, params).tolist()
        assert found[1] == NOT_FINITE
        assert found == by_sampler(logits_RV, params)


def test_banned_tokens_are_out_whatever_the_parameters() -> None:
    R, V = 200, 60
    logits_RV = make_logits("flat", R, V, torch.float32)
    logits_RV[:, 5:] = BANNED
    assert max(ops.sample(logits_RV, mixed_params(R, V)).tolist()) == 4
    logits_RV[:] = BANNED
    assert set(ops.sample(logits_RV, mixed_params(R, V)).tolist()) == {NOTHING_LEFT}


def test_what_is_out_of_range_has_no_token() -> None:
    logits_RV = torch.zeros(3, 9)
    logits_RV[0, 3] = OVERFLOWN
    logits_RV[1, 3] = 1e38
    logits_RV[2] = -1e38
    found = ops.sample(logits_RV, uniform_params(3, temperature=0.1))
    assert found.tolist() == [OUT_OF_RANGE, OUT_OF_RANGE, NOTHING_LEFT]
    assert ops.sample(logits_RV, uniform_params(3, temperature=0)).tolist() == [OUT_OF_RANGE, 3, 0]


@pytest.mark.parametrize("kernel", ["reference", "numba"])
def test_columns_may_be_a_part_of_the_vocabulary(kernel: str) -> None:
    R, V = 60, 300
    whole_RV = make_logits("flat", R, V, torch.float32)
    part_RW, ids_W = part_of(whole_RV, 70)
    run = ops.sample.reference if kernel == "reference" else ops.sample
    params = mixed_params(R, V)
    found = run(part_RW, params, ids_W).tolist()
    assert found == ops.sample(whole_RV, params).tolist()
    assert len(set(found)) > 10
    part_RW[1, 2] = math.nan
    assert run(part_RW, params, ids_W).tolist() == [*found[:1], NOT_FINITE, *found[2:]]
