"""Expert parallelism: each rank holds whole experts, and computes them for the tokens of all ranks.

Every rank has all rows of a step and routes them alike, so each knows which rows its experts are chosen for. On CPUs a
rank is the *home* of a part of the tokens: the results of their experts are sent to it, one row for each chosen expert,
and it adds them up in the order of the experts' numbers, as one device does. So the sums have the bits that they have
on one device, wherever the experts are. On GPUs each rank adds up the results of its own experts.

Shapes: T tokens, D model, X experts, S experts selected per token, W ranks, P slots of a rank, R rows.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.experts import Mixture
from octavo.ops.collective import Collective


class ExpertPlacement:
    """Which experts each rank holds, each in one of its slots; an expert may have copies on several ranks."""

    def __init__(self, experts_WP: Tensor, num_experts: int, rank: int) -> None:
        """``experts``: int64, the expert in each slot; -1: none."""
        self.rank = rank
        self.experts_WP = experts_WP
        self.slot_X = torch.full((num_experts,), -1)
        """Of this rank; -1 where it does not hold the expert."""
        self.rank_XW = torch.empty(num_experts, len(experts_WP), dtype=torch.int64)
        """Which rank computes an expert for token t, by t % W: its copies take turns."""
        self.fill()

    @classmethod
    def even(cls, num_experts: int, collective: Collective, num_spare: int = 0) -> ExpertPlacement:
        """Equal parts of the experts in their order; some ranks have one less than others if they do not divide.

        Each rank has ``num_spare`` slots more, at first with copies of the experts that follow its own.
        """
        W, X = collective.size, num_experts
        starts, most = [rank * X // W for rank in range(W + 1)], min(X, -(-X // W) + num_spare)
        experts_WP = torch.full((W, most), -1)
        for row_P, (start, end) in zip(experts_WP, itertools.pairwise(starts), strict=True):
            count = min(most, end - start + num_spare)
            row_P[:count] = torch.arange(start, start + count) % X
        return cls(experts_WP, X, collective.rank)

    @property
    def own(self) -> list[int]:
        """The experts in this rank's slots."""
        return [expert for expert in self.experts_WP[self.rank].tolist() if expert >= 0]

    def fill(self) -> None:
        """Follow a change of ``experts``."""
        W, own_P = len(self.experts_WP), self.experts_WP[self.rank]
        self.slot_X.fill_(-1)
        self.slot_X[own_P[own_P >= 0]] = torch.arange(len(own_P))[own_P >= 0]
        holds_XW = torch.zeros(len(self.slot_X) + 1, W, dtype=torch.bool)
        holds_XW[self.experts_WP, torch.arange(W)[:, None]] = True  # -1: the last row, of no expert
        holders_XW = holds_XW[:-1].byte().argsort(dim=1, descending=True, stable=True)
        turns_XW = torch.arange(W) % holds_XW[:-1].sum(dim=1, keepdim=True)
        self.rank_XW.copy_(holders_XW.gather(1, turns_XW))


class ParallelMixture(ABC):
    """A mixture of which this rank holds some experts; its results are this rank's part of the sums."""

    def __init__(self, own: Mixture, placement: ExpertPlacement, collective: Collective, device: torch.device) -> None:
        """``own``: the experts in this rank's slots, on the device."""
        self.own, self.placement, self.collective, self.device = own, placement, collective, device
        self.load_X: Tensor | None = None
        """int64: how often each expert was chosen since the load was last read; ``None``: nobody reads it."""
        self.follow()

    @property
    def bytes_by_format(self) -> Mapping[str, int]:
        """See ``Mixture``."""
        return self.own.bytes_by_format

    @abstractmethod
    def follow(self) -> None:
        """Follow a change of ``placement``."""

    @abstractmethod
    def __call__(self, x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Mixture``."""


class HomeMixture(ParallelMixture):
    """For CPUs: this rank's part is the whole sum for the tokens whose home it is, and zero for others."""

    def follow(self) -> None:
        """See ``ParallelMixture``; the placement itself is asked."""

    def __call__(self, x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Mixture``."""
        (T, S), W = ids_TS.shape, self.collective.size
        if self.load_X is not None:
            self.load_X += (ids_TS.flatten() + 1).bincount(minlength=len(self.load_X) + 1)[1:]
        ids_TS, order_TS = ids_TS.sort(dim=1)
        turns_T1 = torch.arange(T, device=x_TD.device).unsqueeze(1) % W
        is_own_TS = (self.placement.rank_XW[ids_TS, turns_T1] == self.collective.rank) & (ids_TS >= 0)
        places_R = is_own_TS.flatten().nonzero()[:, 0]
        slots_R1 = self.placement.slot_X[ids_TS.flatten()[places_R]].unsqueeze(1)
        ones_R1 = torch.ones(slots_R1.shape, dtype=torch.float32, device=x_TD.device)
        rows_RD = self.own(x_TD[places_R // S], slots_R1, ones_R1)
        num_home = -(-T // W)
        found_nD = self.collective.all_to_all(rows_RD, places_R, W * num_home * S)
        first = self.collective.rank * num_home
        home = slice(min(first, T), min(first + num_home, T))
        shares_nS = shares_TS.gather(1, order_TS)[home]
        part_TD = torch.zeros_like(x_TD)
        part_TD[home] = _sum(found_nD.view(num_home, S, -1)[: len(shares_nS)], shares_nS).to(x_TD.dtype)
        return part_TD if residual_TD is None else residual_TD.add_(part_TD)


class PartialMixture(ParallelMixture):
    """For GPUs: this rank's part is the sum over its own experts.

    Its kernels pass over the experts of other ranks, so that the host need not know which rows are whose, and steps can
    be captured as graphs.
    """

    def __init__(self, own: Mixture, placement: ExpertPlacement, collective: Collective, device: torch.device) -> None:
        self.slots_XW = torch.empty_like(placement.rank_XW, device=device)
        """See ``ops.local_expert_ids``; graphs know it by its address."""
        super().__init__(own, placement, collective, device)

    def follow(self) -> None:
        """See ``ParallelMixture``."""
        is_own_XW = self.placement.rank_XW == self.placement.rank
        self.slots_XW.copy_(torch.where(is_own_XW, self.placement.slot_X.unsqueeze(1), -1))

    def __call__(self, x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Mixture``."""
        local_TS = ops.local_expert_ids(ids_TS, self.slots_XW, self.load_X)
        return self.own(x_TD, local_TS, shares_TS, residual_TD)


def _sum(rows_nSD: Tensor, shares_nS: Tensor) -> Tensor:
    """The sum of each token's rows times their shares, in order, in float32 at least."""
    wide = torch.promote_types(rows_nSD.dtype, torch.float32)
    sum_nD = torch.zeros_like(rows_nSD[:, 0], dtype=wide)
    for k in range(rows_nSD.shape[1]):
        sum_nD += rows_nSD[:, k].to(wide) * shares_nS[:, k : k + 1].to(wide)
    return sum_nD
