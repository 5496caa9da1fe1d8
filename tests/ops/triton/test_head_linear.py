"""A map for each head: right, and where asked for the same in any company."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.triton.head_linear import head_linear_triton
from octavo.ops.triton.launch import invariant


@pytest.mark.parametrize("is_invariant", [False, True])
def test_each_head_has_its_own_map(is_invariant: bool, device: str) -> None:
    x_TNK, weight_NOK = torch.randn(5, 3, 24, device=device), torch.randn(3, 40, 24, device=device)
    expected = torch.einsum("tnk,nok->tno", x_TNK.double(), weight_NOK.double())
    if not is_invariant:
        torch.testing.assert_close(head_linear_triton(x_TNK, weight_NOK).double(), expected, rtol=1e-5, atol=1e-5)
        return
    with invariant():
        found = head_linear_triton(x_TNK, weight_NOK)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(head_linear_triton(x_TNK[2:3], weight_NOK), found[2:3])
