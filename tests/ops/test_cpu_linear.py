"""``linear`` and ``encoder_linear``: close to float64, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import encoder_linear, linear
from octavo.ops.dispatch import Op
from octavo.ops.linear import Fused
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors
from tests.tiers import one_in

pytestmark = needs_float_kernels
both = pytest.mark.parametrize("product", [linear, encoder_linear])
Product = Op[..., torch.Tensor]
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
    found = encoder_linear(x, weight, Fused(bias))
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias, rtol=1e-5, atol=1e-4)
    for rows in (slice(0, 1), slice(90, 100), slice(383, 400)):
        assert torch.equal(encoder_linear(x[rows], weight, Fused(bias)), found[rows])
    for outputs in (slice(0, 32), slice(448, 480)):
        assert torch.equal(encoder_linear(x, weight[outputs], Fused(bias[outputs])), found[:, outputs])


@both
def test_sums_of_small_and_large_numbers_are_those_of_float32(product: Product) -> None:
    x, weight = torch.randn(40, 256), torch.randn(32, 256)
    x *= 2.0 ** torch.randint(-30, 30, x.shape)
    weight *= 2.0 ** torch.randint(-30, 30, weight.shape)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((product(x, weight).double() - exact).abs() / size).max() < 4e-7
    x[3, 5], x[4, 5] = torch.nan, torch.inf
    assert (product(x, weight).isfinite().all(dim=1) == x.isfinite().all(dim=1)).all()


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
        product(torch.zeros(1, 32).bfloat16(), torch.zeros(4, 32))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_sixteen_bits_gives_the_bits_of_the_same_in_float32(dtype: torch.dtype, product: Product) -> None:
    x, weight, gated = torch.randn(7, 96), torch.randn(64, 96).to(dtype), Fused(activation="silu")
    assert torch.equal(product(x, weight, gated), product(x, weight.float(), gated))
