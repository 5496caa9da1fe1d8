"""``linear``: close to float64, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import linear
from octavo.ops.linear import Fused
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors

pytestmark = needs_float_kernels
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 1), (64, 576), (67, 100), (3, 7), (130, 32)])
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 13])
def test_close_to_float64(shape: tuple[int, int], dtype: torch.dtype, num_tokens: int) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(num_tokens, shape[1]).to(dtype)
    for offset in (bias, None):
        exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        found = linear(x, weight, Fused(offset))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_does_not_depend_on_other_rows_or_on_threads(dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(301, 200).to(dtype), torch.randn(301).to(dtype), torch.randn(64, 200).to(dtype)
    alone = torch.cat([linear(row, weight, Fused(bias)) for row in x[:, None]])
    try:
        for count in (1, 2, 3):
            threads.set_num_threads(count)
            for num_rows in range(1, 65):
                start = (64 - num_rows) // 2
                found = linear(x[start : start + num_rows], weight, Fused(bias))
                assert torch.equal(found, alone[start : start + num_rows]), num_rows
    finally:
        threads.set_num_threads(1)


def test_transposed_and_empty_inputs() -> None:
    weight, x = torch.randn(32, 48), torch.randn(48, 9)
    assert torch.equal(linear(x.T, weight), linear(x.T.contiguous(), weight))
    assert torch.equal(linear(x.T, weight.T.contiguous().T), linear(x.T, weight))
    assert linear(x.T[:0], weight).shape == (0, 32)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="32 columns"):
        linear(torch.zeros(1, 32), torch.zeros(4, 33))
    with pytest.raises(ValueError, match="bfloat16"):
        linear(torch.zeros(1, 32).bfloat16(), torch.zeros(4, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_sixteen_bits_gives_the_bits_of_the_same_in_float32(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 96), torch.randn(64, 96).to(dtype)
    assert torch.equal(linear(x, weight, Fused(activation="silu")), linear(x, weight.float(), Fused(activation="silu")))
