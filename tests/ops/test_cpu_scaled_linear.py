"""``scaled_linear``: close to float64 for every number and shape, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import linear, scaled_linear
from octavo.ops.linear.linear import Fused
from octavo.ops.linear.scaled_linear import ScaledValues
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors, random_values

pytestmark = needs_float_kernels


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


def dense(weight: ScaledValues) -> torch.Tensor:
    return weight.rows(torch.arange(len(weight.values_NK)))


def test_every_number_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(1, -1)
    weight = ScaledValues(codes.view(torch.float8_e4m3fn), torch.tensor([[1.0]]), codes.shape[1])
    found = scaled_linear(torch.eye(codes.shape[1]), weight)
    assert torch.equal(found.squeeze(1), codes.view(torch.float8_e4m3fn).float().squeeze(0))


@pytest.mark.parametrize(
    ("shape", "group"),
    [((64, 576), 576), ((67, 256), 128), ((130, 576), 128), ((3, 7), 7), ((37, 100), 16), ((1, 40), 32), ((5, 48), 16)],
)
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 13])
def test_close_to_float64(shape: tuple[int, int], group: int, num_tokens: int) -> None:
    weight, bias, x = random_values(*shape, group), torch.randn(shape[0]), torch.randn(num_tokens, shape[1])
    exact = x.double() @ dense(weight).double().T + bias.double()
    torch.testing.assert_close(scaled_linear(x, weight, Fused(bias)).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [320, 128])
def test_a_row_does_not_depend_on_other_rows_or_on_threads(group: int) -> None:
    weight, bias, x = random_values(301, 320, group), torch.randn(301), torch.randn(64, 320)
    alone = torch.cat([scaled_linear(row, weight, Fused(bias)) for row in x[:, None]])
    try:
        for count in (1, 2, 3):
            threads.set_num_threads(count)
            for num_rows in range(1, 65):
                start = (64 - num_rows) // 2
                found = scaled_linear(x[start : start + num_rows], weight, Fused(bias))
                assert torch.equal(found, alone[start : start + num_rows]), num_rows
    finally:
        threads.set_num_threads(1)


def test_with_a_scale_of_a_power_of_two_it_is_linear() -> None:
    weight, x = random_values(64, 96, 96), torch.randn(7, 96)
    weight.scales_NG.fill_(0.25)
    assert torch.equal(
        scaled_linear(x, weight, Fused(activation="silu")),
        linear(x, dense(weight), Fused(activation="silu")),
    )


def test_groups_that_do_not_fit_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 24 inputs"):
        scaled_linear(torch.zeros(1, 48), random_values(4, 48, 24))
    with pytest.raises(ValueError, match="48 columns"):
        scaled_linear(torch.zeros(1, 48), random_values(4, 64, 64))
