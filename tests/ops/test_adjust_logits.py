"""The reference of ``ops.adjust_logits`` against the sampler's own steps."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import ops
from octavo.ops.sampling.sampling import NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE
from tests.ops.adjusting_cases import by_process, make_rows, packed
from tests.ops.sampling_cases import make_logits, uniform_params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [7, 500, 3000])
def test_same_as_the_samplers_steps(V: int, dtype: torch.dtype) -> None:
    rows, logits_RV = make_rows(64, V), make_logits("flat", 64, V, dtype)
    found = ops.adjust_logits(logits_RV, packed(rows, V))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_process(logits_RV, rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_whatever_is_asked(bad: float) -> None:
    V = 500
    logits_RV = make_logits("flat", 32, V, torch.float32)
    logits_RV[:, 99] = bad
    found = ops.adjust_logits(logits_RV, packed(make_rows(32, V), V))
    assert found[:, 99].isnan().all()
    assert set(ops.sample(found, uniform_params(32)).tolist()) == {NOT_FINITE}


def test_sampling_reports_what_went_wrong() -> None:
    V = 16
    adjustments = packed(make_rows(3, V)[:1] * 3, V)
    adjustments.has_mask_R[1] = True
    adjustments.slot_R[2], adjustments.length_R[2], adjustments.repetition_R[2] = 0, 1, 1e-44
    adjustments.history_SL[0, 0] = 5
    found = ops.sample(ops.adjust_logits(torch.ones(3, V), adjustments), uniform_params(3, temperature=0))
    assert found.tolist() == [0, NOTHING_LEFT, OUT_OF_RANGE]
