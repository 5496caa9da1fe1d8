"""What follows attention as one op: the same results as layer by layer, and layers that it must leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.layers.lora import AdapterRows
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.layers.output_mlp import output_mlp
from octavo.quant.stored.packed import GroupedWeight
from octavo.quant.stored.stored_weight import DenseWeight
from tests.ops.triton.test_grouped_linear import random_groups

D, A, F = 128, 256, 384


def packed(N: int, K: int) -> GroupedWeight:
    return GroupedWeight(random_groups("cpu", "int4", N, K, 128), torch.float32)


def layers() -> tuple[Linear, MLP]:
    norm = RMSNorm(torch.rand(D) + 0.5, 1e-6)
    mlp = MLP(norm, Linear([packed(2 * F, D)]), Linear([packed(D, F)]), "silu", None)
    return Linear([packed(D, A)]), mlp


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The rows that were given to the op."""
    found: list[Tensor] = []
    one = ops.grouped_output_mlp

    def noted(attended_TA: Tensor, *rest: object) -> Tensor:
        found.append(attended_TA)
        return one(attended_TA, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "grouped_output_mlp", noted)
    return found


@pytest.mark.parametrize("T", [1, 3])
def test_packed_layers_are_one_op_with_the_same_results(T: int, calls: list[Tensor]) -> None:
    output, mlp = layers()
    attended_TA, x_TD = torch.randn(T, A), torch.randn(T, D)
    expected = mlp(output(attended_TA, residual=x_TD.clone()))
    assert torch.equal(output_mlp(output, mlp, attended_TA, x_TD.clone()), expected)
    assert len(calls) == 1


def test_what_adds_to_results_is_left_to_its_layers(calls: list[Tensor]) -> None:
    output, mlp = layers()
    biased = Linear(output.weights, torch.randn(D))
    adapted = AdapterRows().make_linear(output.weights)
    dense = Linear([DenseWeight(torch.randn(D, A))])
    several = Linear([packed(D // 2, A), packed(D // 2, A)])
    attended_TA, x_TD = torch.randn(2, A), torch.randn(2, D)
    for other in (biased, adapted, dense, several):
        expected = mlp(other(attended_TA, residual=x_TD.clone()))
        assert torch.equal(output_mlp(other, mlp, attended_TA, x_TD.clone()), expected)
    own = MLP(mlp.before, mlp.up, Linear(mlp.down.weights, torch.randn(D)), "silu", None)  # type: ignore[union-attr]
    assert torch.equal(
        output_mlp(output, own, attended_TA, x_TD.clone()), own(output(attended_TA, residual=x_TD.clone()))
    )
    assert torch.equal(output_mlp(output, lambda x: x, attended_TA, x_TD.clone()), output(attended_TA) + x_TD)
    assert not calls
