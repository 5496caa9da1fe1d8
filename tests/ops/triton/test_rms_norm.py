"""RMSNorm against float64, with poisoned results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo_kernels.triton.norms import rms_norm_triton
from tests.ops.triton.poison import poison_new_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half a unit in the last place of the result, in float32 a few."""


def expected(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (1, 100), (5, 1024), (2, 1536), (2, 3, 128), (7, 2, 96)])
def test_values(device: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)
    x = torch.randn(shape, device=device).mul(3).to(dtype)
    weight_D = torch.randn(shape[-1], device=device).to(dtype)
    out = rms_norm_triton(x, weight_D, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected(x, weight_D, 1e-5), rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1024), (2, 3, 100)])
def test_a_residual_is_added_before_rounding(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight_D = torch.randn(shape[-1], device=device).to(dtype)
    kept = residual.clone()
    out = rms_norm_triton(x, weight_D, 1e-5, residual)
    exact = expected(x, weight_D, 1e-5) + residual.double()
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=2e-6)
    assert torch.equal(residual, kept)


def test_rows_that_are_parts_of_wider_rows(device: str) -> None:
    x_TW = torch.randn(5, 200, device=device)
    weight_D = torch.randn(96, device=device)
    out = rms_norm_triton(x_TW[:, 40:136], weight_D, 1e-6)
    torch.testing.assert_close(out.double(), expected(x_TW[:, 40:136], weight_D, 1e-6), rtol=1e-5, atol=1e-6)


def test_no_rows(device: str) -> None:
    assert rms_norm_triton(torch.empty(0, 64, device=device), torch.ones(64, device=device), 1e-6).shape == (0, 64)


@pytest.mark.parametrize("D", [64, 1500])
def test_a_row_does_not_depend_on_the_others(device: str, D: int) -> None:
    x_TD, weight_D = torch.randn(35, D, device=device), torch.randn(D, device=device)
    together = rms_norm_triton(x_TD, weight_D, 1e-6)
    alone = torch.cat([rms_norm_triton(row, weight_D, 1e-6) for row in x_TD.split(1)])
    assert torch.equal(together, alone)
