"""Rows in the order of experts' tiles."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels.triton.experts.gather_rows import BLOCK_K, gather_rows


@pytest.mark.parametrize("K", [8, BLOCK_K + 24])
def test_each_pair_has_the_row_of_its_token(device: str, K: int) -> None:
    T, S = 5, 3
    x_TK = torch.randn(T, K, device=device).bfloat16()
    order_P = torch.randperm(T * S, device=device).int()
    placed = T * S - 4
    order_P[placed:] = 1 << 30  # of pairs without a place
    used = torch.tensor([1, placed], dtype=torch.int32, device=device)
    assert torch.equal(gather_rows(x_TK, order_P, used)[:placed], x_TK[order_P[:placed].long() // S])
