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

    def exchange(self, x_TPX: Tensor) -> Tensor:
        """What each of P neighbouring ranks has for this one, given what this one has for each: a new tensor [P, T, X].

        P divides W, and the first of the neighbours is rank 0, or P, or 2 P and so on.
        """
        ...


def gathered_rows(collective: Collective, x_RD: Tensor, places_R: Tensor, num_places: int) -> Tensor:
    """``all_to_all`` through ``all_gather``: every rank gets the rows of all, so it is for few of them."""
    table_WnD = x_RD.new_zeros(num_places, x_RD.shape[1])
    table_WnD[places_R] = x_RD
    n = num_places // collective.size
    own = slice(collective.rank * n, (collective.rank + 1) * n)
    return collective.all_gather(table_WnD)[:, own].sum(dim=0, dtype=x_RD.dtype)


def exchanged_rows(collective: Collective, x_TPX: Tensor) -> Tensor:
    """``exchange`` through ``all_to_all``."""
    T, P, X = x_TPX.shape
    own = collective.rank % P
    targets_P = collective.rank - own + torch.arange(P, device=x_TPX.device)
    places_TP = targets_P * P * T + own * T + torch.arange(T, device=x_TPX.device)[:, None]
    x_RX = x_TPX.reshape(T * P, X)
    return collective.all_to_all(x_RX, places_TP.flatten(), collective.size * P * T).view(P, T, X)


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

    def exchange(self, x_TPX: Tensor) -> Tensor:
        """See ``Collective``."""
        return exchanged_rows(self, x_TPX)


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


WHOLE_CONTEXT = ContextPart(0, 1)


class ContextRanks(NamedTuple):
    """The neighbouring ranks among which the context of every sequence is divided; they hold the same KV heads."""

    collective: Collective
    size: int
    """Their number P."""

    @property
    def part(self) -> ContextPart:
        """That of this rank."""
        return ContextPart(self.collective.rank % self.size, self.size)

    def gathered(self, x: Tensor) -> Tensor:
        """What each of these ranks has: a new tensor [P, ...]."""
        first = self.collective.rank - self.part.rank
        return self.collective.all_gather(x)[first : first + self.size]
