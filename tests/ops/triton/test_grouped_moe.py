"""Experts of packed groups against the op's reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.ops.moe import ClampedSwish, GroupedExperts, SquaredReLU, grouped_moe, has_gates, join_experts
from octavo_kernels.triton.experts.grouped_moe import grouped_moe_triton
from tests.ops.triton.poison import poison_new_tensors
from tests.ops.triton.test_grouped_linear import random_groups
from tests.tiers import one_in
from tests.triton_interpreter import quick_first

D, F, X, S = 96, 64, 5, 2


def make(
    device: str, number: str, group: int, zeros: bool = False, activation: Any = "silu", biases: bool = False
) -> Any:
    def joined(N: int, K: int) -> PackedGroups:
        packed = join_experts([random_groups(device, number, N, K, group, zeros) for _ in range(X)])
        assert packed is not None
        return packed

    inner = 2 * F if has_gates(activation) else F
    given = [torch.randn(X, width, device=device).bfloat16() for width in (inner, D)] if biases else [None, None]
    return GroupedExperts(X, joined(inner, D), joined(D, F), activation, *given)


def tokens(device: str, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(X - 1)[:S] for _ in range(T)]).to(device)  # one expert has no rows
    return torch.randn(T, D, device=device).bfloat16(), ids, torch.rand(T, S, device=device)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


FORMATS = [
    ("int4", 32, True),
    ("uint4", 32, False),
    ("int8", 0, False),
    ("e4m3", 0, False),
    ("e2m1", 16, False),
]


@one_in(5)
@pytest.mark.parametrize(("number", "group", "zeros"), FORMATS)
@pytest.mark.parametrize("activation", quick_first(1, ["silu", ClampedSwish(1.7, 2.0), SquaredReLU()]))
@pytest.mark.parametrize("T", [1, 30])
def test_experts_agree_with_the_reference(
    device: str, T: int, activation: Any, number: str, group: int, zeros: bool
) -> None:
    experts = make(device, number, group, zeros, activation, biases=T > 1)
    x, ids, shares = tokens(device, T)
    wide = experts._replace(
        gate_up_bias=None if experts.gate_up_bias is None else experts.gate_up_bias.float(),
        down_bias=None if experts.down_bias is None else experts.down_bias.float(),
    )
    expected = grouped_moe.reference(x.float(), ids, shares, wide)
    allowed = 2**-5 * expected.abs().max().item()
    found = grouped_moe_triton(x, ids, shares, experts)
    torch.testing.assert_close(found.float(), expected, rtol=2**-5, atol=allowed)
    residual = torch.randn_like(x)
    found = grouped_moe_triton(x, ids, shares, experts, residual.clone())
    torch.testing.assert_close(found.float(), expected + residual.float(), rtol=2**-5, atol=allowed)


@pytest.mark.parametrize(("number", "group", "zeros"), quick_first(1, FORMATS))
@pytest.mark.parametrize("num_routed", [4 * X, X + 1], ids=["pair by pair", "in tiles"])
def test_ids_of_other_ranks_experts_add_nothing(
    device: str, num_routed: int, number: str, group: int, zeros: bool
) -> None:
    T = 4 if num_routed > 2 * X else 30
    experts = make(device, number, group, zeros)._replace(num_routed=num_routed)
    x, ids, shares = tokens(device, T)
    for local in (torch.where(ids == 1, -1, ids), torch.full_like(ids, -1)):
        expected = grouped_moe.reference(x.float(), local, shares, experts)
        residual = torch.randn_like(x)
        found = grouped_moe_triton(x, local, shares, experts, residual.clone())
        allowed = 2**-5 * max(expected.abs().max().item(), 1)
        torch.testing.assert_close(found.float(), expected + residual.float(), rtol=2**-5, atol=allowed)


def test_no_rows(device: str) -> None:
    x, ids, shares = tokens(device, 1)
    assert grouped_moe_triton(x[:0], ids[:0], shares[:0], make(device, "int4", 32)).shape == (0, D)


def test_experts_that_differ_are_not_joined(device: str) -> None:
    first = random_groups(device, "int4", 32, 64, 32)
    assert join_experts([first, random_groups(device, "int4", 32, 64, 64)]) is None
    assert join_experts([random_groups(device, "int4", 24, 64, 32)]) is None
    joined = join_experts([first, random_groups(device, "int4", 48, 64, 32)])  # two experts at a time, and then three
    assert joined is not None
    assert joined.shape == (80, 64)
    assert torch.equal(joined.rows(torch.arange(32, device=device)), first.unpack())
