"""What follows attention with packed weights: when one kernel does all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops import grouped_output_mlp
from octavo_kernels.triton.grouped import grouped_output_mlp as in_triton
from octavo_kernels.triton.grouped.grouped_output_mlp import grouped_output_mlp_triton
from octavo_kernels.triton.launch import invariant, no_grid_barriers
from octavo_kernels.triton.tuning.product_calls import collecting
from tests.ops.triton.test_grouped_linear import random_groups

D, A, F = 256, 128, 384


def arguments(T: int) -> tuple[Any, ...]:
    output, gate_up, down = (random_groups("cpu", "int4", N, K, 128) for N, K in ((D, A), (2 * F, D), (D, F)))
    return torch.randn(T, A), torch.randn(T, D), output, torch.rand(D) + 0.5, 1e-6, gate_up, down, "silu"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whenever a tiling was asked for."""
    found: list[int] = []

    def config_of(*args: object) -> None:
        found.append(1)

    def reference(attended_TA: Tensor, x_TD: Tensor, *rest: object) -> Tensor:
        return x_TD

    monkeypatch.setattr(in_triton, "config_of", config_of)
    monkeypatch.setattr(grouped_output_mlp, "reference", reference)
    return found


def test_one_row_may_be_one_kernel(asked: list[int]) -> None:
    grouped_output_mlp_triton(*arguments(1))
    assert asked == [1]


def test_several_rows_are_not(asked: list[int]) -> None:
    grouped_output_mlp_triton(*arguments(2))
    assert asked == []


@pytest.mark.parametrize("around", [no_grid_barriers, invariant, collecting])
def test_nor_is_one_beside_others_invariant_or_while_products_are_collected(around: Any, asked: list[int]) -> None:
    with around():
        grouped_output_mlp_triton(*arguments(1))
    assert asked == []
