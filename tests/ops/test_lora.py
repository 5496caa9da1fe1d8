"""Low-rank changes against float64, group by group."""

from __future__ import annotations

import pytest
import torch

from octavo import ops
from octavo.ops.linear.linear import LowRank, RowGroup

K, N = 32, 24


def change(start: int, size: int, rank: int, dtype: torch.dtype) -> LowRank:
    return LowRank(start, torch.randn(rank, K).to(dtype), torch.randn(size, rank).to(dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-5)])
@pytest.mark.parametrize("rank", [1, 8, 13])
def test_each_group_is_changed_by_its_own(dtype: torch.dtype, tolerance: float, rank: int) -> None:
    x_TK, y_TN = torch.randn(40, K).to(dtype), torch.randn(40, N).to(dtype)
    groups = [
        RowGroup(0, 1, [change(0, N, rank, dtype)]),
        RowGroup(3, 20, [change(0, 8, rank, dtype), change(16, 8, rank, dtype)]),
        RowGroup(20, 30, []),
        RowGroup(30, 39, [change(4, 12, 2, dtype)]),
    ]
    wanted = y_TN.double()
    for start, end, changes in groups:
        for first, down, up in changes:
            wanted[start:end, first : first + len(up)] += x_TK[start:end].double() @ down.double().T @ up.double().T
    before = y_TN.clone()
    found = ops.lora(y_TN, x_TK, groups)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance * rank, rtol=tolerance * 4)
    for untouched in (slice(1, 3), slice(20, 30), slice(39, 40)):
        assert torch.equal(found[untouched], before[untouched])
    assert torch.equal(found[3:20, 8:16], before[3:20, 8:16])


def test_a_row_does_not_depend_on_the_others() -> None:
    x_TK, y_TN = torch.randn(40, K), torch.randn(40, N)
    own = change(0, N, 8, torch.float32)
    alone = ops.lora(y_TN[7:8].clone(), x_TK[7:8], [RowGroup(0, 1, [own])])
    x_TK[8:], y_TN[8:] = torch.nan, torch.nan
    together = ops.lora(y_TN, x_TK, [RowGroup(2, 30, [own])])
    assert torch.equal(together[7:8], alone)
