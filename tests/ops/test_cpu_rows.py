"""Norms and gates: close to float64, and the same bits in any batch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops import elementwise
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors

pytestmark = needs_float_kernels
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


def assert_close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (2, 3, 64), (0, 64)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, has_residual: bool) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    residual = torch.randn(shape).to(dtype) if has_residual else None
    wide = x.double()
    found = ops.rms_norm(x, weight, 1e-5, residual)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    assert found.is_contiguous(), "it may be the residual stream, to which a projection adds in place"
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(found, exact if residual is None else exact + residual.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 3072), (0, 32)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    found = ops.silu_and_mul(x)
    assert found.dtype == dtype
    assert_close(found, gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 640), (0, 32)])
def test_sigmoid_and_mul_of_some_columns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wider, x = (torch.randn(shape[0], shape[1] + 5) * 30).to(dtype), torch.randn(shape).to(dtype)
    gate = wider[:, 3 : 3 + shape[1]]
    found = ops.sigmoid_and_mul(gate, x)
    assert found.dtype == dtype
    assert_close(found, x.double() / (1 + torch.exp(-gate.double())))
    assert torch.equal(ops.concat(gate), gate.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (70, 640), (0, 32)])
def test_scaled_columns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wider, addend = (torch.randn(shape[0], shape[1] + 5) * 30).to(dtype), torch.randn(shape).to(dtype)
    x, factors = wider[:, 3 : 3 + shape[1]], torch.randn(shape[1])
    for factor in (0.3, factors):
        found, sums = ops.scaled(x, factor), ops.scaled(x, factor, addend)
        assert found.dtype == sums.dtype == dtype
        assert_close(found, x.double() * factor)
        assert_close(sums, x.double() * factor + addend.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (70, 640), (0, 32)])
def test_what_is_added_to_a_residual_stream(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    gate = (torch.randn(shape[0], 1) * 30).to(dtype)
    for share, factor in ((0.3, 0.3), (gate, 1 / (1 + torch.exp(-gate.double())))):
        found = ops.add_scaled(x.clone(), share, residual.clone())
        assert found.dtype == dtype
        assert_close(found, x.double() * factor + residual.double())
    with pytest.raises(AssertionError, match="the residual is"):
        ops.add_scaled(torch.ones(2, 16), torch.ones(2, 1), torch.ones(2, 16, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 3072), (0, 32)])
def test_activations_of_experts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
    found = ops.clamped_swish(x, 1.7, 3.0)
    assert found.dtype == dtype
    assert_close(found, gate / (1 + torch.exp(-1.7 * gate)) * (up + 1))
    squares = ops.squared_relu(x.clone())
    assert squares.dtype == dtype
    assert_close(squares, x.double().clamp(min=0) ** 2)


def test_activations_of_experts_keep_what_is_no_number() -> None:
    x = torch.tensor([[float("nan"), float("inf"), 1.0, float("nan")]])
    assert ops.clamped_swish(x, 1.7, 3.0).isnan().all()
    assert ops.squared_relu(x.clone()).isnan().tolist() == x.isnan().tolist()


def test_silu_over_the_whole_range() -> None:
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([float("inf"), float("nan"), 1e38, -1e38])])
    found = ops.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    wide = gate.double()
    exact = wide / (1 + torch.exp(-wide))
    normal = wide.abs() < 87
    assert bool(((found.double() - exact).abs() <= 4e-7 * exact.abs())[normal].all())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        elementwise.sigmoid,
        functools.partial(elementwise.gelu, approximate=False),
        functools.partial(elementwise.gelu, approximate=True),
    ],
)
def test_functions_of_numbers_do_not_depend_on_where_these_are(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(90, 7) * 3
    whole = function(x)
    for first in range(1, 80):
        assert torch.equal(function(x[first : first + 9].clone()), whole[first : first + 9])
        assert torch.equal(function(x[:first, :5]), whole[:first, :5])


def test_functions_of_numbers_are_right() -> None:
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, 1e38, -1e38, float("nan")])])
    exact = x.double()
    assert_close(elementwise.sigmoid(x)[:-1], exact.sigmoid()[:-1])
    assert_close(elementwise.gelu(x, False)[:-1], torch.nn.functional.gelu(exact)[:-1])
    assert_close(elementwise.gelu(x, True)[:-1], torch.nn.functional.gelu(exact, approximate="tanh")[:-1])
    assert elementwise.sigmoid(x)[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_of_heads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 3, 50).to(dtype)[:, :, :40], torch.randn(3, 21, 40).to(dtype)
    found = ops.head_linear(x, weight)
    assert_close(found / 10, torch.einsum("tnk,nok->tno", x.double(), weight.double()) / 10)
    assert torch.equal(ops.head_linear(x[4:6], weight), found[4:6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_other_rows_or_on_threads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(64, 1800).to(dtype), torch.randn(1800).to(dtype)

    def compute(rows: slice) -> list[Tensor]:
        return [ops.rms_norm(x[rows], weight, 1e-6), ops.silu_and_mul(x[rows])]

    alone = [torch.cat(rows) for rows in zip(*(compute(slice(t, t + 1)) for t in range(64)), strict=True)]
    try:
        for count in (1, 3):
            threads.set_num_threads(count)
            for num_rows in range(1, 65):
                for found, expected in zip(compute(slice(64 - num_rows, 64)), alone, strict=True):
                    assert torch.equal(found, expected[64 - num_rows :]), num_rows
    finally:
        threads.set_num_threads(1)


@pytest.mark.parametrize("has_bias", [False, True])
def test_columns_of_parts_are_concatenated(has_bias: bool) -> None:
    parts = [torch.randn(5, 3), torch.randn(5, 16), torch.ones(5, 1)]
    bias = torch.randn(20) if has_bias else None
    whole, start = torch.empty(5, 20), 0
    for part in parts:
        ops.put_columns(part, whole, start, bias)
        start += part.shape[1]
    exact = torch.cat(parts, dim=1)
    assert torch.equal(whole, exact if bias is None else exact + bias)


@pytest.mark.parametrize("columns", [16, 40])
def test_layer_norm_of_rows_far_from_zero(columns: int) -> None:
    x, weight, bias = torch.randn(90, columns) * 2 + 100, torch.randn(columns), torch.randn(columns)
    found = ops.layer_norm(x, weight, bias, 1e-12)
    exact = torch.nn.functional.layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-12)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(ops.layer_norm(x[7:8].clone(), weight, bias, 1e-12), found[7:8]), "depends on other rows"


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_of_all_sizes(approximate: bool) -> None:
    x = torch.cat([torch.linspace(-40, 40, 4003), torch.tensor([0.0, -0.0, 1e38, -1e38, float("inf"), float("nan")])])
    found, exact = ops.gelu(x, approximate), x.double()
    expected = torch.nn.functional.gelu(exact, approximate="tanh" if approximate else "none")
    torch.testing.assert_close(found[:-2].double(), expected[:-2], rtol=2e-6, atol=1e-7)
    assert found[-2] == torch.inf
    assert found[-1].isnan()
    assert torch.equal(ops.gelu(x[5:14], approximate), found[5:14]), "depends on other numbers"
