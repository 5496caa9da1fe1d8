"""Kernels of ``token_logprobs`` against float64, with guards around their memory."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.sampling.sampling import BANNED, token_logprobs
from octavo_kernels.triton.sampling import token_logprobs as kernels
from octavo_kernels.triton.sampling.token_logprobs import token_logprobs_triton
from tests.ops.sampling_cases import generator, make_logits
from tests.ops.triton.guards import Guarded
from tests.tiers import one_in

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@one_in(4)
@pytest.mark.parametrize(("kind", "dtype"), [("flat", torch.float32), ("peaked", torch.bfloat16), ("tied", torch.half)])
@pytest.mark.parametrize(("V", "n"), [(1, 1), (21, 20), (600, 40), (2048, 0), (4500, 5)])
def test_values(kind: str, dtype: torch.dtype, V: int, n: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    R = 6
    logits_RV = make_logits(kind, R, V, dtype)
    tokens_R = torch.randint(V, (R,), generator=generator(V), dtype=torch.int32)
    tokens_R[0] = logits_RV[0].float().argmax()
    tokens_R[3] = -1
    guarded = Guarded(torch.empty)
    with monkeypatch.context() as patch:
        patch.setattr(kernels.torch, "empty", guarded)
        found = token_logprobs_triton(logits_RV.to(device), tokens_R.to(device), n)
    guarded.check()
    expected = token_logprobs.reference(logits_RV.double(), tokens_R, n)
    exact_RV = logits_RV.double().log_softmax(1)
    is_asked = tokens_R >= 0
    exact = exact_RV[is_asked].gather(1, tokens_R[is_asked].long().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.logprob_R.cpu()[is_asked].double(), exact, rtol=1e-6, atol=2e-6)
    assert torch.equal(found.rank_R.cpu()[is_asked], expected.rank_R[is_asked])
    assert torch.equal(found.top_ids_Rn.cpu()[is_asked], expected.top_ids_Rn[is_asked])
    top = exact_RV.gather(1, expected.top_ids_Rn.long())[is_asked]
    torch.testing.assert_close(found.top_logprobs_Rn.cpu()[is_asked].double(), top, rtol=1e-6, atol=2e-6)


def test_rows_that_lie_apart_and_none(device: str) -> None:
    wide_RV = make_logits("flat", 3, 700, torch.float32).to(device)
    tokens_R = torch.tensor([4, 0, 499], dtype=torch.int32, device=device)
    expected = token_logprobs.reference(wide_RV[:, :500].contiguous(), tokens_R, 3)
    for logits_RV in (wide_RV[:, :500], wide_RV.T.contiguous().T[:, :500]):
        found = token_logprobs_triton(logits_RV, tokens_R, 3)
        assert torch.equal(found.top_ids_Rn, expected.top_ids_Rn)
        torch.testing.assert_close(found.logprob_R, expected.logprob_R, rtol=1e-6, atol=2e-6)
    assert token_logprobs_triton(wide_RV[:0], tokens_R[:0], 3).top_ids_Rn.shape == (0, 3)


def test_most_tokens_are_left_out(device: str) -> None:
    """As by filters: whole chunks of the vocabulary have nothing."""
    logits_RV = torch.full((1, 4500), BANNED, device=device)
    logits_RV[0, 2300:2303] = torch.tensor([1.0, 3.0, 2.0])
    found = token_logprobs_triton(logits_RV, torch.tensor([2301], dtype=torch.int32, device=device), 3)
    assert found.top_ids_Rn[0].tolist() == [2301, 2302, 2300]
    exact = torch.tensor([3.0, 2.0, 1.0]).log_softmax(0)
    torch.testing.assert_close(found.top_logprobs_Rn[0].cpu(), exact, rtol=1e-6, atol=2e-6)
