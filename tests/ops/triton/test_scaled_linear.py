"""Weights of 8 bits times rows, rounded to their type if several: all parts, partial tiles, the same bits for a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.linear.linear import Fused
from octavo.ops.linear.scaled_linear import ScaledValues
from octavo_kernels.triton.launch import invariant
from octavo_kernels.triton.linear.scaled_linear import scaled_linear_triton
from tests.ops.triton.test_linear import PARTS
from tests.tiers import one_in
from tests.triton_interpreter import DEVICE

EPS = 1e-6
SHAPES = [(1, 10, 8200), (1, 48, 64), (1, 130, 1100), (7, 72, 96), (40, 130, 100)]
if DEVICE == "cuda":
    SHAPES += [(1, 6144, 4096), (1, 4096, 12288), (64, 4096, 2048), (90, 520, 100), (300, 6144, 4096)]


NUMBERS = [torch.float8_e4m3fn, torch.int8]


def random_values(N: int, K: int, number: torch.dtype = torch.float8_e4m3fn) -> ScaledValues:
    spread = 40 if number == torch.int8 else 1
    values_NK = (torch.randn(N, K, device=DEVICE) * spread).clamp(-128, 127).to(number)
    return ScaledValues(values_NK, (torch.rand(N, 1, device=DEVICE) * 2 + 1) / spread / K**0.5, K)


def rounded(x_TK: Tensor, number: torch.dtype | None, norm_K: Tensor | None = None) -> Tensor:
    """Rows as they are rounded to these numbers, if to any, in float64."""
    x_TK = x_TK.float()
    if norm_K is not None:
        x_TK = x_TK * torch.rsqrt(x_TK.square().mean(1, keepdim=True) + EPS) * norm_K.float()
    if number is None:
        return x_TK.double()
    scales_T1 = x_TK.abs().amax(1, keepdim=True) / (127 if number == torch.int8 else 448)
    x_TK = x_TK / scales_T1
    return (x_TK.round() if number == torch.int8 else x_TK.to(number)).double() * scales_T1.double()


def expected(x_TK: Tensor, weight: ScaledValues, given: dict[str, Tensor | None], activation: str | None) -> Tensor:
    number = weight.values_NK.dtype if len(x_TK) > 1 else None
    y_TN = rounded(x_TK, number, given["norm_K"]) @ (weight.values_NK.double() * weight.scales_NG.double()).T
    if given["bias_N"] is not None:
        y_TN += given["bias_N"].double()
    if activation is not None:
        gate, up = y_TN.chunk(2, dim=1)
        y_TN = torch.nn.functional.silu(gate) * up
    return y_TN if given["residual_TN"] is None else y_TN + given["residual_TN"].double()


@one_in(5)
@pytest.mark.parametrize("parts", ["plain", "norm and silu", "bias and residual"])
@pytest.mark.parametrize(("T", "N", "K"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", NUMBERS)
def test_products_of_several_rows_are_those_of_rounded_rows(
    number: torch.dtype, dtype: torch.dtype, T: int, N: int, K: int, parts: str
) -> None:
    torch.manual_seed(T)
    wanted = PARTS.get(parts, {})
    activation, weight = wanted.get("activation"), random_values(N, K, number)
    outputs = N // 2 if activation else N
    x_TK = torch.randn(T, K, device=DEVICE, dtype=dtype)
    given = {
        "bias_N": torch.randn(N, device=DEVICE, dtype=dtype) if wanted.get("bias_N") else None,
        "norm_K": torch.rand(K, device=DEVICE, dtype=dtype) + 0.5 if wanted.get("norm_K") else None,
        "residual_TN": torch.randn(T, outputs, device=DEVICE, dtype=dtype) if wanted.get("residual_TN") else None,
    }
    exact = expected(x_TK, weight, given, activation)
    found = scaled_linear_triton(x_TK, weight, Fused(eps=EPS, activation=activation, **given))
    assert found.dtype == dtype
    error = (found.double() - exact).norm() / exact.norm()
    assert error < 6e-3, f"{float(error):.1e}"  # cuBLAS sums with fewer bits; a number at the edge may round otherwise


@pytest.mark.parametrize("number", NUMBERS)
def test_a_row_of_zeros_gives_zeros(number: torch.dtype) -> None:
    assert not scaled_linear_triton(torch.zeros(3, 64, device=DEVICE).bfloat16(), random_values(32, 64, number)).any()


@pytest.mark.parametrize("number", NUMBERS)
def test_invariant_rows_have_the_same_bits_in_any_company(number: torch.dtype) -> None:
    sizes = (700, 6144, 1024) if DEVICE == "cuda" else (70, 64, 128)
    x_TK, weight = torch.randn(sizes[0], sizes[2], device=DEVICE).bfloat16(), random_values(*sizes[1:], number)
    with invariant():
        whole = scaled_linear_triton(x_TK, weight, Fused(activation="silu"))
        for T in (1, 2, 16, 63, 64, sizes[0] - 10):
            assert torch.equal(
                scaled_linear_triton(x_TK[5 : 5 + T], weight, Fused(activation="silu")), whole[5 : 5 + T]
            )


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="32 columns, the weight 64"):
        scaled_linear_triton(torch.zeros(1, 32, device=DEVICE).bfloat16(), random_values(16, 64))
    with pytest.raises(ValueError, match="15 outputs"):
        scaled_linear_triton(
            torch.zeros(1, 64, device=DEVICE).bfloat16(), random_values(15, 64), Fused(activation="silu")
        )
