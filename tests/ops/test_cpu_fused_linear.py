"""What stands around a matrix product: norm, bias, gate and residual, for dense and block weights alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import block_linear, linear, scaled_linear, sliced_linear
from octavo.ops.linear.block_linear import PackedBlocks
from octavo.ops.linear.linear import Activation, Fused
from octavo.ops.linear.sliced_linear import SlicedValues
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors, random_blocks, random_values
from tests.tiers import one_in

pytestmark = needs_float_kernels
K = 64
ACTIVATIONS: list[Activation | None] = [None, "silu", "gelu_tanh", "gelu"]
Apply = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


def dense(N: int) -> tuple[Apply, Tensor, float]:
    weight = torch.randn(N, K) * 0.2
    return lambda x, *rest: linear(x, weight, Fused(*rest)), weight, 2e-5


def slices(N: int) -> tuple[Apply, Tensor, float]:
    _, weight, tolerance = dense(N)
    packed = SlicedValues.pack(weight)
    return lambda x, *rest: sliced_linear(x, packed, Fused(*rest)), weight, tolerance


def blocks(N: int) -> tuple[Apply, Tensor, float]:
    packed = PackedBlocks.pack(random_blocks("Q8_0", N, K))
    return lambda x, *rest: block_linear(x, packed, Fused(*rest)), packed.unpack(), 0.5


def scaled(N: int) -> tuple[Apply, Tensor, float]:
    weight = random_values(N, K, 32)
    return lambda x, *rest: scaled_linear(x, weight, Fused(*rest)), weight.rows(torch.arange(N)), 2e-5


@one_in(3)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("N", [64, 32, 40, 37])
@pytest.mark.parametrize("make", [dense, slices, blocks, scaled])
def test_close_to_float64(
    make: Callable[[int], tuple[Apply, Tensor, float]], N: int, activation: Activation | None
) -> None:
    if activation and N % 2:
        pytest.skip("a gated map has an even number of outputs")
    apply, weight, tolerance = make(N)
    x, bias, norm = torch.randn(13, K) * 3, torch.randn(N), torch.randn(K)
    residual = torch.randn(13, N // 2 if activation else N)
    for with_norm, with_bias, with_residual in itertools.product([True, False], repeat=3):
        y = x.double()
        if with_norm:
            y = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.double()
        y = functional.linear(y, weight.double(), bias.double() if with_bias else None)
        if activation:
            gate, up = y.chunk(2, dim=-1)
            form = "tanh" if activation == "gelu_tanh" else "none"
            y = (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate=form)) * up
        if with_residual:
            y = y + residual.double()
        options = bias if with_bias else None, norm if with_norm else None, 1e-3
        found = apply(x, *options, residual.clone() if with_residual else None, activation)
        torch.testing.assert_close(found.double(), y, rtol=tolerance, atol=tolerance * float(y.abs().max()))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("make", [dense, slices, blocks, scaled])
def test_a_row_does_not_depend_on_other_rows_or_on_threads(
    make: Callable[[int], tuple[Apply, Tensor, float]], activation: Activation | None
) -> None:
    apply, _, _ = make(96)
    x, bias, norm = torch.randn(40, K), torch.randn(96), torch.randn(K)
    residual = torch.randn(40, 48 if activation else 96)

    def rows(part: slice) -> Tensor:
        return apply(x[part], bias, norm, 1e-5, residual[part].clone(), activation)

    alone = torch.cat([rows(slice(t, t + 1)) for t in range(40)])
    try:
        for count in (1, 3):
            threads.set_num_threads(count)
            for num_rows in range(1, 41):
                assert torch.equal(rows(slice(40 - num_rows, 40)), alone[40 - num_rows :]), num_rows
    finally:
        threads.set_num_threads(1)


def test_the_residual_may_be_the_input() -> None:
    for make in (dense, slices, blocks, scaled):
        apply, _, _ = make(K)
        x, norm = torch.randn(5, K), torch.randn(K)
        expected = apply(x, None, norm, 1e-5, x.clone(), None)
        assert torch.equal(apply(x, None, norm, 1e-5, x, None), expected)


def test_what_does_not_fit_is_refused() -> None:
    for make in (dense, slices, blocks, scaled):
        apply, _, _ = make(32)
        for options in ((torch.randn(31),), (None, torch.randn(K + 1)), (None, None, 0.0, torch.randn(2, 31))):
            with pytest.raises(ValueError, match="contiguous, of shape"):
                apply(torch.randn(2, K), *options)
