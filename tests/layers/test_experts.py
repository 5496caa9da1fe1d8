"""Experts as a checkpoint stores them: packed where all of their matrices are, dense otherwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from octavo.layers import experts
from octavo.layers.experts import DenseMixture, GroupedMixture, PackedMixture, StoredExperts, make_mixture
from octavo.ops import dispatch
from octavo.ops.linear.linear import Activation
from octavo.ops.moe import ClampedSwish
from octavo.quant.stored import scaled
from octavo.quant.stored.block_weight import GgufStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight, WeightFormat
from tests.ops.cpu_cases import needs_float_kernels, random_blocks

X, D, F, S = 4, 64, 32, 2
DENSE = WeightFormat(torch.float32, torch.device("cpu"))
PACKING = dataclasses.replace(DENSE, packs=True)


def blocks(kind: str, rows: int, columns: int, seed: int) -> StoredWeight:
    return GgufStored((random_blocks(kind, rows, columns, seed),))


def stored(
    kinds: tuple[str, str, str],
    activation: Activation | ClampedSwish = "silu",
    biases: tuple[Tensor, Tensor] | None = None,
) -> StoredExperts:
    gate, up, down = kinds
    return StoredExperts(
        X,
        lambda i: [blocks(gate, F, D, i), blocks(up, F, D, X + i)],
        lambda i: [blocks(down, D, F, 2 * X + i)],
        activation,
        *(biases or (None, None)),
    )


def chosen(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(X)[:S] for _ in range(num_tokens)])
    return torch.randn(num_tokens, D), ids, torch.rand(num_tokens, S)


@needs_float_kernels
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwish(1.7, 7.0)])
@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0", "Q8_0"), ("Q4_0", "Q5_0", "Q8_0")])
def test_packed_experts_compute_what_dense_ones_do(
    kinds: tuple[str, str, str], activation: Activation | ClampedSwish
) -> None:
    experts = stored(kinds, activation, (torch.randn(X, 2 * F), torch.randn(X, D)))
    dense, packed = make_mixture(experts, DENSE), make_mixture(experts, PACKING)
    assert isinstance(dense, DenseMixture)
    assert isinstance(packed, PackedMixture)
    assert sum(packed.bytes_by_format.values()) < sum(dense.bytes_by_format.values()) // 2
    x, ids, shares = chosen(9)
    expected, found = dense(x, ids, shares), packed(x, ids, shares)
    assert (found - expected).norm() < 0.03 * expected.norm()
    assert torch.equal(packed(x[3:5], ids[3:5], shares[3:5]), found[3:5])  # whatever else is in the step


@needs_float_kernels
def test_one_matrix_without_a_kernel_makes_all_dense() -> None:
    numbers = DenseStored((torch.randn(D, F),))
    experts = dataclasses.replace(stored(("Q8_0", "Q8_0", "Q8_0")), down=lambda i: [numbers])
    found, expected = make_mixture(experts, PACKING), make_mixture(experts, DENSE)
    assert isinstance(found, DenseMixture)
    assert torch.equal(found(*(given := chosen(5))), expected(*given))


def test_a_kernel_of_all_experts_is_for_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = stored(("Q8_0", "Q8_0", "Q8_0"))
    monkeypatch.setattr("octavo.layers.experts.ops.moe.chosen", lambda device, dtype: "fused")
    assert isinstance(make_mixture(experts, PACKING), DenseMixture)
    monkeypatch.undo()
    with dispatch.only(dispatch.REFERENCE):
        assert isinstance(make_mixture(experts, PACKING), DenseMixture)


def test_experts_that_are_not_packed_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first of them once more, to see that they are not."""
    monkeypatch.setattr(experts, "packs_groups", lambda form: form.packs)
    read = []

    def matrix(rows: int, columns: int, index: int) -> StoredWeight:
        read.append(index)
        return DenseStored((torch.randn(rows, columns),))

    weights = StoredExperts(X, lambda i: [matrix(2 * F, D, i)], lambda i: [matrix(D, F, i)], "silu")
    assert isinstance(make_mixture(weights, PACKING), DenseMixture)
    assert len(read) <= 2 * (X + 3)
    assert sum(index == X - 1 for index in read) == 2


@pytest.mark.parametrize("at_once", [1, 3, X])
def test_experts_are_packed_some_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a GPU are, whose kernels are not asked here; the last time there may be fewer."""
    for module in (experts, scaled):
        monkeypatch.setattr(module, "packs_groups", lambda form: form.packs)
    monkeypatch.setattr(experts, "PACKED_AT_ONCE", at_once * 2 * F * D)

    def matrix(rows: int, columns: int, seed: int) -> StoredWeight:
        values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 20).to(
            torch.float8_e4m3fn
        )
        return ScaledStored(values, torch.full((rows // 16, columns // 32), 0.01 * (1 + seed)), (16, 32))

    weights = StoredExperts(
        X, lambda i: [matrix(F, D, i), matrix(F, D, X + i)], lambda i: [matrix(D, F, 2 * X + i)], "silu"
    )
    found = make_mixture(weights, PACKING)
    assert isinstance(found, GroupedMixture)
    dense = make_mixture(weights, DENSE)
    assert isinstance(dense, DenseMixture)
    assert torch.equal(found.experts.gate_up.unpack().view(X, 2 * F, D), dense.experts.gate_up)
    assert torch.equal(found.experts.down.unpack().view(X, D, F), dense.experts.down)
