"""The experts of a layer, with quantised (packed) or dense weights.

Shapes: T tokens, R rows of one expert, D model, X experts, S experts selected per token, F the width of an expert.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.ops.dispatch import REFERENCE
from octavo.ops.linear.grouped_linear import TILE, PackedGroups
from octavo.ops.moe import ExpertActivation, Experts, GroupedExperts, join_experts
from octavo.quant.stored.packed import GroupedWeight, packs_groups
from octavo.quant.stored.stored_weight import (
    StoredWeight,
    WeightFormat,
    bytes_by_format,
    dtype_name,
    fill,
    make_weights,
)

PACKED_AT_ONCE = 1 << 28
"""Entries of the matrices of experts that are packed together."""


class Mixture(Protocol):
    """All experts of a layer; ``ops.moe`` defines the computation."""

    @property
    def bytes_by_format(self) -> Mapping[str, int]:
        """Bytes of the weights, by the format of their numbers."""
        ...

    def __call__(
        self, x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None = None
    ) -> Tensor: ...


class DenseMixture:
    """Experts with dense weights, computed together by ``ops.moe``."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    @property
    def bytes_by_format(self) -> Mapping[str, int]:
        return Counter({dtype_name(self.experts.down.dtype): self.experts.gate_up.nbytes + self.experts.down.nbytes})

    def __call__(self, x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        return ops.moe(x_TD, ids_TS, shares_TS, self.experts, residual_TD)


class GroupedMixture:
    """Experts with packed groups, computed together by ``ops.grouped_moe``."""

    def __init__(self, experts: GroupedExperts) -> None:
        self.experts = experts

    @property
    def bytes_by_format(self) -> Mapping[str, int]:
        return bytes_by_format([self.experts.gate_up, self.experts.down])

    def __call__(self, x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        return ops.grouped_moe(x_TD, ids_TS, shares_TS, self.experts, residual_TD)


class PackedMixture:
    """Experts with quantised weights: each is a pair of linear maps, computed by the kernel of their format."""

    def __init__(self, experts: Sequence[tuple[Linear, Linear]], activation: ExpertActivation) -> None:
        self.experts = experts
        self.activation = activation

    @property
    def bytes_by_format(self) -> Mapping[str, int]:
        return bytes_by_format(weight for expert in self.experts for linear in expert for weight in linear.weights)

    def __call__(self, x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        return ops.sum_over_experts(x_TD, ids_TS, shares_TS, self, residual_TD)

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def expert(self, index: int, x_RD: Tensor) -> Tensor:
        """See ``SeparateExperts``."""
        gate_up, down = self.experts[index]
        if isinstance(self.activation, str):
            return down(gate_up(x_RD, activation=self.activation))
        return down(self.activation(gate_up(x_RD)))


@dataclass(frozen=True)
class StoredExperts:
    """The experts of a layer as a checkpoint stores them, read one at a time."""

    count: int
    gate_up: Callable[[int], Sequence[StoredWeight]]
    """Rows of an expert's gate projection, if it has one, then of its up projection: together [2 F, D]."""
    down: Callable[[int], Sequence[StoredWeight]]
    """[D, F]"""
    activation: ExpertActivation
    gate_up_bias: Tensor | None = None
    """[X, 2 F]"""
    down_bias: Tensor | None = None
    """[X, D]"""
    num_routed: int = 0
    """See ``ops.moe.Experts``."""
    are_alike: bool = False
    """Whether only the sizes of weights matter, which are those of the first expert: in the outline of a model that is
    known by its configuration alone."""


def make_mixture(stored: StoredExperts, form: WeightFormat) -> Mixture:
    """Prepare experts: packed if all can be, for ``ops.grouped_moe`` or one by one, dense otherwise."""
    if packs_groups(form):
        gate_up, down = (_joined(part, stored.count, form) for part in (stored.gate_up, stored.down))
        if gate_up is not None and down is not None:
            return GroupedMixture(GroupedExperts(stored.count, gate_up, down, *_common(stored)))
    packed = _packed(stored, form)
    if packed is not None:
        return PackedMixture(packed, stored.activation)
    dense_gate_up, dense_down = (_stacked(part, stored, form) for part in (stored.gate_up, stored.down))
    return DenseMixture(Experts(dense_gate_up, dense_down, *_common(stored)))


def _common(stored: StoredExperts) -> tuple[ExpertActivation, Tensor | None, Tensor | None, int]:
    """What dense and packed experts have besides their matrices, in its order."""
    return stored.activation, stored.gate_up_bias, stored.down_bias, stored.num_routed


def _packed(stored: StoredExperts, form: WeightFormat) -> list[tuple[Linear, Linear]] | None:
    if not form.packs or ops.moe.chosen(form.device.type, form.dtype) != REFERENCE:
        return None
    experts = []
    for i in range(1 if stored.are_alike else stored.count):
        parts = make_weights(stored.gate_up(i), form), make_weights(stored.down(i), form)
        if any(weight.dense_NK is not None for weights in parts for weight in weights):
            return None
        biases = (None if bias is None else bias[i] for bias in (stored.gate_up_bias, stored.down_bias))
        gate_up, down = itertools.starmap(Linear, zip(parts, biases, strict=True))
        experts.append((gate_up, down))
    return experts * stored.count if stored.are_alike else experts


def _joined(part: Callable[[int], Sequence[StoredWeight]], count: int, form: WeightFormat) -> PackedGroups | None:
    """The packed matrices of all experts, one after the other; ``None`` if they cannot be packed alike.

    Many are packed at a time: for each alone, kernels that start and answers of the device would take most of the time.
    """
    first = part(0)
    rows, K = sum(piece.shape[0] for piece in first), first[0].shape[1]
    if rows % TILE or _packed_groups(first, form) is None:
        return None
    at_once, packed = max(1, PACKED_AT_ONCE // (rows * K)), list[PackedGroups]()
    for start in range(0, count, at_once):
        pieces = [piece.placed(form.device) for i in range(start, min(start + at_once, count)) for piece in part(i)]
        if (groups := _packed_groups(pieces, form)) is None:
            return None
        packed.append(groups)
    return join_experts(packed)


def _packed_groups(pieces: Sequence[StoredWeight], form: WeightFormat) -> PackedGroups | None:
    """These as one packed matrix; ``None`` if they are something else."""
    weights = make_weights(pieces, form)
    if len(weights) != 1 or not isinstance(weights[0], GroupedWeight):
        return None
    packed = weights[0].packed
    return packed if packed.order_K is None else None


def _stacked(part: Callable[[int], Sequence[StoredWeight]], stored: StoredExperts, form: WeightFormat) -> Tensor:
    """The dense matrices of all experts [X, N, K]."""
    first = part(0)
    shape = (stored.count, sum(piece.shape[0] for piece in first), first[0].shape[1])
    stack_XNK = torch.empty(shape, dtype=form.dtype, device=form.device)
    for i, matrix_NK in enumerate(() if stored.are_alike else stack_XNK):
        fill(matrix_NK, part(i))
    return stack_XNK
