"""Attention of whole texts against float64, text by text."""

from __future__ import annotations

import pytest
import torch

from octavo import ops

N, H = 3, 8


def reference(qkv_TW: torch.Tensor, ends: list[int]) -> torch.Tensor:
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        q, k, v = (part.view(-1, N, H).transpose(0, 1) for part in qkv_TW[start:end].double().chunk(3, dim=-1))
        weights = (q @ k.mT / H**0.5).softmax(dim=-1)
        rows.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("ends", [[1], [5], [1, 2, 40], [17, 18, 50, 130]])
def test_each_text_attends_to_all_of_itself(dtype: torch.dtype, tolerance: float, ends: list[int]) -> None:
    qkv_TW = torch.randn(ends[-1], 3 * N * H).to(dtype)
    found = ops.encoder_attention(qkv_TW, N, ends)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference(qkv_TW, ends), atol=tolerance, rtol=tolerance)


def test_a_text_that_is_no_number_spoils_no_other() -> None:
    qkv_TW = torch.randn(30, 3 * N * H)
    alone = ops.encoder_attention(qkv_TW[10:20].contiguous(), N, [10])
    qkv_TW[:10] = torch.nan
    qkv_TW[20:] = torch.inf
    assert torch.equal(ops.encoder_attention(qkv_TW, N, [10, 20, 30])[10:20], alone)
