"""Collective operations: what the ranks of a model exchange in a step.

Every rank calls the same operations in the same order. Of ``all_reduce`` and ``all_gather`` all have tensors of equal
shapes, and get the same bits. Sums are computed in float32, in the order of the ranks.

Shapes: T tokens, D model, W ranks, R rows, n places of a rank, P ranks that divide a context, X numbers of any kind.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Collective(Protocol):
    """One rank's access to the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks W."""
        ...

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """The sum of all ranks' ``x``, plus ``residual``, which is equal on all ranks; either may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x``, of equal shapes and types: a new tensor [W, ...]."""
        ...

    def all_to_all(self, x_RD: Tensor, places_R: Tensor, num_places: int) -> Tensor:
        """The rows that the ranks have for this one: a new tensor [n, D], zeros where there is none.

        Ranks may have different numbers R of rows. The place (int64) of a row says whose it becomes and where: there
        are ``num_places`` = W n, the first n those of rank 0, and at most one row for each.
        """
        ...


def gathered_rows(collective: Collective, x_RD: Tensor, places_R: Tensor, num_places: int) -> Tensor:
    """``all_to_all`` through ``all_gather``: every rank gets the rows of all, so it is for few of them."""
    table_WnD = x_RD.new_zeros(num_places, x_RD.shape[1])
    table_WnD[places_R] = x_RD
    n = num_places // collective.size
    own = slice(collective.rank * n, (collective.rank + 1) * n)
    return collective.all_gather(table_WnD)[:, own].sum(dim=0, dtype=x_RD.dtype)


class SingleRank:
    """The collective of a model that is on one device."""

    rank = 0
    size = 1

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Collective``."""
        return x_TD if residual_TD is None else residual_TD.add_(x_TD)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collective``."""
        return x.unsqueeze(0)

    def all_to_all(self, x_RD: Tensor, places_R: Tensor, num_places: int) -> Tensor:
        """See ``Collective``."""
        return gathered_rows(self, x_RD, places_R, num_places)


SINGLE_RANK = SingleRank()


class ContextPart(NamedTuple):
    """Every ``size``-th position of a context, from ``rank`` on; a cache of it has position p in place p // size."""

    rank: int
    size: int

    def count(self, num_positions: int) -> int:
        """How many of the first positions are in this part."""
        return (num_positions - self.rank + self.size - 1) // self.size

    def slots(self, slots_T: Tensor) -> Tensor:
        """The slots in this part's cache, given those in blocks of all parts; -1 for what is in others."""
        return torch.where(slots_T % self.size == self.rank, slots_T // self.size, -1)


class ContextRanks(NamedTuple):
    """The neighbouring ranks among which the context of every sequence is divided; they hold the same KV heads."""

    collective: Collective
    size: int
    """Their number P."""

    @property
    def part(self) -> ContextPart:
        """That of this rank."""
        return ContextPart(self.collective.rank % self.size, self.size)

    @property
    def _first(self) -> int:
        return self.collective.rank - self.part.rank

    def gathered(self, x: Tensor) -> Tensor:
        """What each of these ranks has: a new tensor [P, ...]."""
        return self.collective.all_gather(x)[self._first : self._first + self.size]

    def exchanged(self, x_TPX: Tensor) -> Tensor:
        """What each of these ranks has for this one, given what this one has for each: a new tensor [P, T, X]."""
        T, P, X = x_TPX.shape
        targets_P = self._first + torch.arange(P, device=x_TPX.device)
        places_TP = targets_P * P * T + self.part.rank * T + torch.arange(T, device=x_TPX.device)[:, None]
        num_places = self.collective.size * P * T
        return self.collective.all_to_all(x_TPX.view(T * P, X), places_TP.flatten(), num_places).view(P, T, X)
