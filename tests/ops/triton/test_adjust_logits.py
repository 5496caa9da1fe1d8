"""Kernels of ``adjust_logits`` against the reference, with guards around their memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.ops.sampling.sampling import Adjustments, adjust_logits
from octavo_kernels.triton.sampling import adjust_logits as kernels
from octavo_kernels.triton.sampling.adjust_logits import adjust_logits_triton
from tests.ops.adjusting_cases import make_rows, packed
from tests.ops.sampling_cases import make_logits
from tests.ops.triton.guards import Guarded
from tests.tiers import one_in

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def run(logits_RV: Tensor, adjustments: Adjustments, device: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    guarded = Guarded(torch.empty)
    with monkeypatch.context() as patch:
        patch.setattr(kernels.torch, "empty", guarded)
        out = adjust_logits_triton(logits_RV.to(device), Adjustments(*(column.to(device) for column in adjustments)))
    guarded.check()
    return out.cpu()


@one_in(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [7, 2048, 4500])
def test_all_mixes(V: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adjustments = packed(make_rows(32, V, seed=V), V)
    logits_RV = make_logits("flat", 32, V, dtype)
    found = run(logits_RV, adjustments, device, monkeypatch)
    torch.testing.assert_close(found, adjust_logits.reference(logits_RV, adjustments), rtol=1e-6, atol=1e-6)


@one_in(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    V = 500
    logits_RV = make_logits("flat", 32, V, torch.bfloat16)
    logits_RV[:, ::50] = bad
    found = run(logits_RV, packed(make_rows(32, V), V), device, monkeypatch)
    assert found[:, ::50].isnan().all()
    assert found.isnan().sum() == 320


def test_the_longest_history_and_no_lists(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than all programs take at once; no biases and bans at all, and a mask of no bytes."""
    V, length = 300, 20_000
    a = packed(make_rows(2, V), V)
    history = torch.randint(0, 200, (1, length), dtype=torch.int32)
    a = a._replace(
        history_SL=history,
        slot_R=torch.tensor([0, -1], dtype=torch.int32),
        length_R=torch.tensor([length, 5], dtype=torch.int32),
        num_prompt_tokens_R=torch.tensor([9000, 2], dtype=torch.int32),
        frequency_R=torch.tensor([0.25, 3]),
        bias_ids_RB=torch.empty(2, 0, dtype=torch.int32),
        bias_RB=torch.empty(2, 0),
        banned_ids_RE=torch.empty(2, 0, dtype=torch.int32),
        mask_RW=torch.empty(2, 0, dtype=torch.uint8),
    )
    logits_RV = make_logits("flat", 2, V, torch.float32)
    found = run(logits_RV, a, device, monkeypatch)
    torch.testing.assert_close(found, adjust_logits.reference(logits_RV, a))
    assert torch.equal(found[1], logits_RV[1])
    assert (found[0, :200] < logits_RV[0, :200]).all()


def test_rows_that_lie_apart(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide_RV, adjustments = make_logits("flat", 8, 700, torch.bfloat16), packed(make_rows(8, 500), 500)
    expected = adjust_logits.reference(wide_RV[:, :500], adjustments)
    for logits_RV in (wide_RV[:, :500], wide_RV.T.contiguous().T[:, :500]):
        found = run(logits_RV, adjustments, device, monkeypatch)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
