"""Experts on the device against float64, with poisoned results, whatever is chosen."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from octavo.ops.moe import (
    CappedSwish,
    ClampedSwish,
    ExpertActivation,
    Experts,
    SoftcappedSwish,
    SquaredReLU,
    has_gates,
    moe,
)
from octavo_kernels.triton.experts.expert_tiles import sort_into_tiles, tile_rows
from octavo_kernels.triton.experts.grouped_moe import are_few, moe_triton
from octavo_kernels.triton.launch import invariant
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import one_in

D, F, X, S = 40, 24, 7, 3


def make(
    T: int, activation: ExpertActivation, has_biases: bool, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Experts]:
    torch.manual_seed(T)
    width = 2 * F if has_gates(activation) else F
    biases = [torch.randn(X, width), torch.randn(X, D)] if has_biases else []
    weights = [torch.randn(X, width, D) / D**0.5, torch.randn(X, D, F) / F**0.5, *biases]
    gate_up, down, *rest = (weight.to(device=device, dtype=dtype) for weight in weights)
    ids = torch.stack([torch.randperm(X - 1)[:S] for _ in range(T)]) if T else torch.empty(0, S, dtype=torch.int64)
    x = torch.randn(T, D).to(device=device, dtype=dtype)
    return x, ids.to(device), torch.rand(T, S, device=device), Experts(gate_up, down, activation, *rest)


@one_in(5)
@pytest.mark.parametrize("T", [0, 1, 5, 70])
@pytest.mark.parametrize(
    ("activation", "has_biases", "dtype"),
    [
        ("silu", False, torch.float32),
        ("gelu_tanh", False, torch.bfloat16),
        ("silu", True, torch.float16),
        (ClampedSwish(1.7, 1.0), True, torch.float32),
        (CappedSwish(0.4), False, torch.float32),
        (CappedSwish(0.4, 0.3), False, torch.float32),
        (SoftcappedSwish(3.0, 2.0), False, torch.float32),
        (SquaredReLU(), True, torch.float32),
        (SquaredReLU(), False, torch.bfloat16),
    ],
)
def test_experts(
    T: int,
    activation: ExpertActivation,
    has_biases: bool,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, ids, shares, experts = make(T, activation, has_biases, dtype, device)
    biases = [bias.double() for bias in (experts.gate_up_bias, experts.down_bias) if bias is not None]
    wide = Experts(experts.gate_up.double(), experts.down.double(), activation, *biases)
    expected = moe.reference(x.double(), ids, shares.double(), wide)
    residual = torch.randn_like(x)
    poison_new_tensors(monkeypatch)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 5e-3}[dtype]
    found = moe_triton(x, ids, shares, experts)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    expected += residual.double()
    for context in (contextlib.nullcontext, invariant):
        with context():
            found = moe_triton(x, ids, shares, experts, residual.clone())
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("T", [3, 40])
def test_rows_without_experts_in_common_and_many_experts(T: int, device: str) -> None:
    """So many experts that some rows are taken pair by pair; and sizes that no tile divides."""
    torch.manual_seed(T)
    many, D, F = 32, 41, 27
    experts = Experts(
        torch.randn(many, 2 * F, D, device=device) / D**0.5, torch.randn(many, D, F, device=device) / F**0.5
    )
    ids = torch.stack([torch.randperm(many)[:S] for _ in range(T)]).to(device)
    assert are_few(ids, many) == (T == 3)
    x, shares = torch.randn(T, D, device=device), torch.rand(T, S, device=device)
    expected = moe.reference(x, ids, shares, experts)
    torch.testing.assert_close(moe_triton(x, ids, shares, experts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 9, 200, 700])
def test_every_pair_is_in_one_tile_of_its_expert(T: int, device: str) -> None:
    some = torch.randint(-1, X, (T, S))
    for ids in (torch.randint(0, X, (T, S)), some, torch.full((T, S), X - 1), torch.zeros(T, S, dtype=torch.int64)):
        tiles = sort_into_tiles(ids.to(device), X, tile_rows(T * S, X))
        seen: list[int] = []
        for expert, first, rows in zip(tiles.expert.tolist(), tiles.first.tolist(), tiles.rows.tolist(), strict=True):
            assert 0 <= rows <= tiles.block
            pairs = tiles.order_P[first : first + rows].tolist()
            assert pairs == sorted(pairs)
            assert all(ids.flatten()[pair] == expert for pair in pairs)
            seen += pairs
        assert sorted(seen) == (ids.flatten() >= 0).nonzero()[:, 0].tolist()
        assert tiles.used.tolist() == [(tiles.rows > 0).sum(), len(seen)]


def test_tiles_are_of_one_size_where_rows_must_not_depend_on_others() -> None:
    """Products of tiles of other sizes may add up in another order."""
    with invariant():
        assert len({tile_rows(T * S, X) for T in (1, 200)}) == 1


def test_invariant_rows_do_not_depend_on_their_number(device: str) -> None:
    x, ids, shares, experts = make(70, "silu", False, torch.bfloat16, device)
    with invariant():
        whole = moe_triton(x, ids, shares, experts)
        for T in (1, 2, 33):
            assert torch.equal(moe_triton(x[:T], ids[:T], shares[:T], experts), whole[:T])


@pytest.mark.parametrize("T", [1, 2, 40])
def test_ids_of_other_ranks_experts_add_nothing(T: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, and of one that no token needs; pair by pair, and in tiles."""
    torch.manual_seed(T)
    many, D, F, own = 16, 40, 24, 6
    whole = Experts(
        torch.randn(many, 2 * F, D, device=device), torch.randn(many, D, F, device=device),
        gate_up_bias=torch.randn(many, 2 * F, device=device), down_bias=torch.randn(many, D, device=device),
    )  # fmt: skip
    ids = torch.stack([torch.randperm(many - 1)[:S] for _ in range(T)]).to(device)
    x, shares = torch.randn(T, D, device=device) / 9, torch.rand(T, S, device=device)
    poison_new_tensors(monkeypatch)
    total = torch.zeros(T, D, device=device)
    for part in (slice(0, own), slice(own, many - 1), slice(many - 1, many)):
        weights = (whole.gate_up[part], whole.down[part], "silu", whole.gate_up_bias[part], whole.down_bias[part])
        local = torch.where((ids >= part.start) & (ids < part.stop), ids - part.start, -1)
        found = moe_triton(x, local, shares, Experts(*weights, many))
        expected = moe.reference(x, local, shares, Experts(*weights, many))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        assert found.any() == (local >= 0).any()
        total += found
    torch.testing.assert_close(total, moe.reference(x, ids, shares, whole), rtol=1e-5, atol=1e-4)
