"""Gated activations against float64, with poisoned results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo_kernels.triton.activation import (
    add_scaled_triton,
    gelu_and_mul_triton,
    sigmoid_and_mul_triton,
    silu_and_mul_triton,
)
from tests.ops.triton.poison import poison_new_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half a unit in the last place of the result, in float32 a few."""
LEAST = 6e-6
"""``1 + erf(x)`` of float32 is off by half a unit of 1: times 0.5 |gate| |up| below 100, where the sum is near 0."""


@pytest.fixture(params=[(1, 1), (3, 100), (2, 1024), (5, 2500)], ids=str)
def gate_up_T2F(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    poison_new_tensors(monkeypatch)
    T, F = request.param
    return torch.randn(T, 2 * F, device=device) * 4


def check(out_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, dtype: torch.dtype) -> None:
    assert out_TF.dtype == dtype
    torch.testing.assert_close(out_TF.double(), gate_TF * up_TF, rtol=TOLERANCE[dtype], atol=LEAST)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu(gate_up_T2F: Tensor, dtype: torch.dtype) -> None:
    x = gate_up_T2F.to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    check(silu_and_mul_triton(x), functional.silu(gate), up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", [False, True])
def test_gelu(gate_up_T2F: Tensor, approximate: bool, dtype: torch.dtype) -> None:
    x = gate_up_T2F.to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    gate = functional.gelu(gate, approximate="tanh" if approximate else "none")
    check(gelu_and_mul_triton(x, approximate), gate, up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoids_of_numbers_and_of_rows(gate_up_T2F: Tensor, dtype: torch.dtype) -> None:
    x = gate_up_T2F.to(dtype)
    gate, up = x.chunk(2, dim=-1)  # columns of a wider tensor
    check(sigmoid_and_mul_triton(gate, up), gate.double().sigmoid(), up.double(), dtype)
    share, exact = gate[:, :1], gate[:, :1].double().sigmoid() * up.double()
    check(add_scaled_triton(up, share, torch.zeros_like(up)), torch.ones_like(exact), exact, dtype)
    found = add_scaled_triton(up.clone(), share, gate.clone()).double()
    torch.testing.assert_close(found, exact + gate.double(), rtol=TOLERANCE[dtype], atol=1e-5)
    found = add_scaled_triton(up.clone(), 0.5, gate.clone()).double()
    torch.testing.assert_close(found, 0.5 * up.double() + gate.double(), rtol=2 * TOLERANCE[dtype], atol=1e-5)


def test_large_gates_stay_finite(device: str) -> None:
    x = torch.tensor([[-1e30, 1e30, -200.0, 200.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    expected = torch.tensor([[0.0, 1e30, 0.0, 200.0]], device=device)
    torch.testing.assert_close(silu_and_mul_triton(x), expected)


def test_no_rows(device: str) -> None:
    assert silu_and_mul_triton(torch.empty(0, 64, device=device)).shape == (0, 32)
