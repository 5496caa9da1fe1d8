"""The choice of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo.ops import dispatch
from octavo.ops.attention.attention import rotary_angles
from octavo.ops.dispatch import KernelChoice, Op
from octavo.ops.embedding import embedding


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op[[Tensor], Tensor]]:
    monkeypatch.setattr(dispatch.OPS, "by_name", {})

    @dispatch.op
    def double(x: Tensor) -> Tensor:
        return x * 2

    return double


def add_kernels(double: Op[[Tensor], Tensor]) -> None:
    @double.kernel(device="cpu", name="slow", preference=1, supports=lambda dtype: None)
    def slow(x: Tensor) -> Tensor:
        return x * 0 + 1

    @double.kernel(
        device="cpu", name="fast", preference=2, supports=lambda d: None if d == torch.float32 else "only float32"
    )
    def fast(x: Tensor) -> Tensor:
        return x * 0 + 2

    @double.kernel(device="cuda", name="gpu", preference=9, supports=lambda dtype: None)
    def gpu(x: Tensor) -> Tensor:
        raise AssertionError("wrong device")


def test_reference_runs_when_nothing_else_is_registered(double: Op[[Tensor], Tensor]) -> None:
    assert double(torch.tensor([3.0])).tolist() == [6.0]


def test_highest_preference_that_does_not_decline_runs(double: Op[[Tensor], Tensor]) -> None:
    assert double(torch.tensor([3.0])).tolist() == [6.0]
    add_kernels(double)
    assert double(torch.tensor([3.0])).tolist() == [2.0]
    assert double(torch.tensor([3.0], dtype=torch.float64)).tolist() == [1.0]


def test_only_forces_a_kernel_or_the_reference_and_then_lets_go(double: Op[[Tensor], Tensor]) -> None:
    add_kernels(double)
    x = torch.tensor([3.0])
    with dispatch.only("reference"):
        assert double(x).tolist() == [6.0]
        with dispatch.only("slow"):
            assert double(x).tolist() == [1.0]
        assert double(x).tolist() == [6.0]
    assert double(x).tolist() == [2.0]


def test_choices_give_the_reason(double: Op[[Tensor], Tensor]) -> None:
    add_kernels(double)
    assert dispatch.choices("cpu", torch.float16) == [
        KernelChoice("double", "fast", False, "only float32"),
        KernelChoice("double", "slow", True, ""),
        KernelChoice("double", "reference", False, "slow is preferred"),
    ]


def test_ops_of_ids_are_chosen_for_integers() -> None:
    chosen = {choice.op: choice.reason for choice in dispatch.choices("cpu", torch.float32) if choice.kernel == "numba"}
    for item in (embedding, rotary_angles):
        assert "must be int64" not in chosen[item.name]


def test_two_ops_of_one_name_are_a_mistake(double: Op[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError, match="two ops"):
        dispatch.op(double.reference)
