"""``linear`` and ``sliced_linear``: close to float64, and the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops import linear, sliced_linear
from octavo.ops.linear.linear import PLAIN, Fused
from octavo.ops.linear.sliced_linear import SlicedValues
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors
from tests.tiers import one_in

pytestmark = needs_float_kernels
Product = Callable[..., Tensor]


def sliced(x: Tensor, weight: Tensor, fused: Fused = PLAIN) -> Tensor:
    return sliced_linear(x, SlicedValues.pack(weight), fused)


both = pytest.mark.parametrize("product", [linear, sliced])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


@one_in(7)
@both
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 1), (64, 576), (67, 100), (3, 7), (130, 32)])
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 13])
def test_close_to_float64(shape: tuple[int, int], dtype: torch.dtype, num_tokens: int, product: Product) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(num_tokens, shape[1]).to(dtype)
    for offset in (bias, None):
        exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        found = product(x, weight, Fused(offset))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@both
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_does_not_depend_on_other_rows_or_on_threads(dtype: torch.dtype, product: Product) -> None:
    weight, bias, x = torch.randn(301, 200).to(dtype), torch.randn(301).to(dtype), torch.randn(64, 200).to(dtype)
    alone = torch.cat([product(row, weight, Fused(bias)) for row in x[:, None]])
    try:
        for count in (1, 2, 3):
            threads.set_num_threads(count)
            for num_rows in range(1, 65):
                start = (64 - num_rows) // 2
                found = product(x[start : start + num_rows], weight, Fused(bias))
                assert torch.equal(found, alone[start : start + num_rows]), num_rows
    finally:
        threads.set_num_threads(1)


def test_groups_of_rows_and_of_outputs_give_the_same_bits() -> None:
    x, weight, bias = torch.randn(400, 1552), torch.randn(500, 1552), torch.randn(500)
    found = sliced(x, weight, Fused(bias))
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias, rtol=1e-5, atol=1e-4)
    for rows in (slice(0, 1), slice(90, 100), slice(383, 400)):
        assert torch.equal(sliced(x[rows], weight, Fused(bias)), found[rows])
    for outputs in (slice(0, 32), slice(448, 480)):
        assert torch.equal(sliced(x, weight[outputs], Fused(bias[outputs])), found[:, outputs])


def test_sums_of_small_and_large_numbers_are_those_of_float32() -> None:
    x, weight = torch.randn(40, 256), torch.randn(32, 256)
    x *= 2.0 ** torch.randint(-30, 30, x.shape)
    weight *= 2.0 ** torch.randint(-30, 30, weight.shape)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((linear(x, weight).double() - exact).abs() / size).max() < 4e-7


@both
def test_rows_that_are_not_finite_give_none_that_are(product: Product) -> None:
    x, weight = torch.randn(40, 256), torch.randn(32, 256)
    x[3, 5], x[4, 5], x[5], x[6] = torch.nan, torch.inf, 1e37, 0
    found = product(x, weight * 1e-3)
    assert (found.isfinite().all(dim=1) == x.isfinite().all(dim=1)).all()
    assert not found[6].any()
    weight[7, 9] = -torch.inf
    assert (product(torch.ones(1, 256), weight).isfinite()[0] == weight.isfinite().all(dim=1)).all()


@pytest.mark.parametrize("num_large", [0, 1, 5])
@pytest.mark.parametrize("size", [3e-20, 1.0, 1e20])
def test_slices_are_as_good_as_float32(size: float, num_large: int) -> None:
    """Numbers that are far larger than a row's others do not make these less exact."""
    x, weight = torch.randn(64, 384), torch.randn(64, 384) * 0.05
    weight[:32, :num_large] = 0  # only the others count
    x[:, :num_large] *= 1e4
    exact = x.double() @ weight.double().T
    found = sliced(x * size, weight).double() / size
    for outputs in (slice(0, 32), slice(32, 64)):
        error = (found - exact)[:, outputs].norm() / exact[:, outputs].norm()
        assert error < 4e-7, f"{error:.2e}"


def test_what_is_packed_is_close_to_the_weight_everywhere() -> None:
    weight = torch.randn(70, 100) * 10.0 ** torch.arange(-35, 35)[:, None]
    packed = SlicedValues.pack(weight)
    rows = packed.rows(torch.arange(70))
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert ((rows - weight).abs() <= torch.maximum(largest * 2.0**-22, torch.tensor(1e-30))).all()
    assert packed.slices.shape == (6, 2, 3, 16, 16, 4)
    assert packed.num_bytes == 6 * 16 * (3 * 128 + 4)


@both
def test_transposed_and_empty_inputs(product: Product) -> None:
    weight, x = torch.randn(32, 48), torch.randn(48, 9)
    assert torch.equal(product(x.T, weight), product(x.T.contiguous(), weight))
    assert torch.equal(product(x.T, weight.T.contiguous().T), product(x.T, weight))
    assert product(x.T[:0], weight).shape == (0, 32)


@both
def test_what_does_not_fit_is_refused(product: Product) -> None:
    with pytest.raises(ValueError, match="32 columns"):
        product(torch.zeros(1, 32), torch.zeros(4, 33))
    with pytest.raises(ValueError, match="bfloat16"):
        linear(torch.zeros(1, 32).bfloat16(), torch.zeros(4, 32))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_sixteen_bits_gives_the_bits_of_the_same_in_float32(dtype: torch.dtype, product: Product) -> None:
    x, weight, gated = torch.randn(7, 96), torch.randn(64, 96).to(dtype), Fused(activation="silu")
    assert torch.equal(product(x, weight, gated), product(x, weight.float(), gated))
