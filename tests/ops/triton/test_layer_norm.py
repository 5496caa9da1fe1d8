"""What GPT-2 needs between its maps, against float64, with poisoned results."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from octavo_kernels.triton.activation import gelu_triton
from octavo_kernels.triton.norms import layer_norm_triton
from tests.ops.triton.poison import poison_new_tensors

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 768), (5, 1000)], ids=str)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(shape[0], 2 * shape[1], device=device).to(dtype) * 3 + 2
    x = wide[:, : shape[1]]  # rows that lie apart
    weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    expected = functional.layer_norm(x.double(), shape[1:], weight.double(), bias.double(), 1e-5)
    poison_new_tensors(monkeypatch)
    found = layer_norm_triton(x, weight, bias, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 700)], ids=str)
def test_gelu(
    shape: tuple[int, int], approximate: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (torch.randn(shape, device=device) * 4).to(dtype)
    expected = functional.gelu(x.double(), approximate="tanh" if approximate else "none")
    poison_new_tensors(monkeypatch)
    found = gelu_triton(x, approximate)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_rows_far_from_zero_keep_their_variance(device: str) -> None:
    x = torch.tensor([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], device=device)
    one, zero = torch.ones(4, device=device), torch.zeros(4, device=device)
    expected = torch.tensor([[-1.5, -0.5, 0.5, 1.5]], device=device) / 1.25**0.5
    torch.testing.assert_close(layer_norm_triton(x, one, zero, 0.0), expected, rtol=1e-3, atol=1e-3)
