"""A map for each head: right for any number of rows, and where asked for the same in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo_kernels.triton.launch import invariant
from octavo_kernels.triton.linear import head_linear as module
from octavo_kernels.triton.linear.head_linear import head_linear_triton
from tests.ops.triton.poison import poison_new_tensors

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(x_TNK: Tensor, weight_NOK: Tensor) -> Tensor:
    found = head_linear_triton(x_TNK, weight_NOK)
    assert found.is_contiguous()
    expected = torch.einsum("tnk,nok->tno", x_TNK.double(), weight_NOK.double())
    tolerance = TOLERANCE[x_TNK.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * x_TNK.shape[2] ** 0.5)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("T", [0, 1, 5, 16, 33, 150])
def test_each_head_has_its_own_map(
    T: int, is_invariant: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_tensors(monkeypatch)
    monkeypatch.setattr(module, "MOST_IN_TILES", 100)  # the last is computed by cuBLAS
    x_TNK, weight_NOK = (torch.randn(shape).to(device, dtype) for shape in ((T, 3, 24), (3, 40, 24)))
    if not is_invariant:
        check(x_TNK, weight_NOK)
        return
    with invariant():
        found = check(x_TNK, weight_NOK)
        assert torch.equal(head_linear_triton(x_TNK[2:3], weight_NOK), found[2:3])


@pytest.mark.parametrize(("K", "outputs"), [(512, 128), (136, 33), (300, 70), (1, 1)])
def test_sizes_of_heads(K: int, outputs: int, device: str) -> None:
    check(torch.randn(9, 2, K).to(device, torch.bfloat16), torch.randn(2, outputs, K).to(device, torch.bfloat16))


@pytest.mark.parametrize("T", [7, 300])
def test_parts_of_wider_rows(T: int, device: str) -> None:
    """Queries are followed by their rotated parts; a transposed input is one, too."""
    x_TNK, weight_NOK = torch.randn(T, 3, 40, device=device), torch.randn(3, 50, 24, device=device)
    check(x_TNK[..., :24], weight_NOK)
    check(torch.randn(24, T, 3, device=device).permute(1, 2, 0), weight_NOK)
