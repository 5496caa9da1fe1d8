"""What a weight is on its way from a checkpoint to a kernel.

A ``StoredWeight`` is one matrix as the checkpoint has it. It is divided, joined and put in order in that form, and then
becomes a ``LinearWeight``: packed where there is a kernel for its format, dense otherwise.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo import ops
from octavo.errors import CheckpointError
from octavo.ops.linear import Activation

Order = npt.NDArray[np.int64]
"""For each row of the result, the row of the matrix that it is."""


@dataclass(frozen=True)
class WeightFormat:
    """What weights become when they are loaded. ``dtype`` is that of activations too."""

    dtype: torch.dtype
    device: torch.device
    packs: bool = False
    """Whether quantised weights stay packed where a kernel computes with them; otherwise every weight is made dense."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values that suits: beside weights of 8 bits and less, 16 bits lose nothing more."""
        return torch.float16 if self.packs else self.dtype


class LinearWeight(Protocol):
    """A matrix [N, K] that a kernel computes with."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        ...

    @property
    def dense_NK(self) -> Tensor | None:
        """The matrix, if it is dense."""
        ...

    def apply(
        self,
        x_TK: Tensor,
        bias_N: Tensor | None = None,
        norm_K: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """``act(rms_norm(x) @ weight.T + bias) + residual`` in the dtype of x; see ``ops.linear``."""
        ...

    def rows(self, ids_T: Tensor) -> Tensor:
        """Dense rows [T, K] by number (int64), as an embedding looks them up.

        On a CPU raises ``IndexError`` for a number that is not a row's.
        """
        ...


class StoredWeight(Protocol):
    """One matrix [N, K] as a checkpoint stores it, on the host and unread as far as the file allows.

    ``rows``, ``join`` and ``shard`` give a weight of the same values: nothing is rounded. They raise
    ``CheckpointError`` for what the format cannot do.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def layout(self) -> Hashable:
        """Weights of equal layouts can be joined."""
        ...

    def rows(self, order: Order) -> Self:
        """These rows, in this order."""
        ...

    def join(self, others: Sequence[Self]) -> Self:
        """The rows of this weight, then those of the others, which have its layout and as many columns."""
        ...

    def shard(self, dim: int, rank: int, size: int) -> Self:
        """Part ``rank`` of ``size`` equal ones: of the rows (``dim`` 0) or of the columns (1)."""
        ...

    def fill(self, out_NK: Tensor) -> None:
        """Write the matrix, dense, into a tensor of any floating-point type on any device."""
        ...

    def dense(self, form: WeightFormat) -> Tensor:
        """The matrix, dense, in the format's type on its device; what it is stored in if that is it already."""
        ...

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        """The matrix as a kernel of the device computes with it, ``None`` where it is to be made dense."""
        ...


@dataclass(frozen=True)
class DenseWeight:
    """A weight as a plain matrix."""

    weight_NK: Tensor

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes

    @property
    def dense_NK(self) -> Tensor | None:
        return self.weight_NK

    def apply(
        self,
        x_TK: Tensor,
        bias_N: Tensor | None = None,
        norm_K: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        return ops.linear(x_TK, self.weight_NK, bias_N, norm_K, eps, residual_TN, activation)

    def rows(self, ids_T: Tensor) -> Tensor:
        return ops.embedding(ids_T, self.weight_NK)


@dataclass(frozen=True)
class DenseStored:
    """A matrix stored as plain numbers: the rows of one tensor after those of another."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]

    @property
    def layout(self) -> Hashable:
        return "dense"

    def rows(self, order: Order) -> DenseStored:
        return DenseStored((self._one()[torch.from_numpy(order)],))

    def join(self, others: Sequence[DenseStored]) -> DenseStored:
        return DenseStored(tuple(itertools.chain(self.parts, *(other.parts for other in others))))

    def shard(self, dim: int, rank: int, size: int) -> DenseStored:
        own = shard_range(self.shape, dim, rank, size)
        return DenseStored((self._one().narrow(dim, own.start, len(own)),))

    def fill(self, out_NK: Tensor) -> None:
        for rows, part in zip(out_NK.split_with_sizes([len(part) for part in self.parts]), self.parts, strict=True):
            rows.copy_(part)

    def dense(self, form: WeightFormat) -> Tensor:
        if len(self.parts) > 1:
            return filled([self], form)
        return self.parts[0].to(device=form.device, dtype=form.dtype).contiguous()

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        return None

    def _one(self) -> Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)


def shard_range(shape: tuple[int, int], dim: int, rank: int, size: int, unit: int = 1) -> range:
    """The rows (``dim`` 0) or columns (1) of part ``rank`` of ``size``, which must be whole units of so many.

    Raises ``CheckpointError``.
    """
    if shape[dim] % (size * unit):
        what = ("rows", "columns")[dim]
        units = f" in whole blocks of {unit}" if unit > 1 else ""
        raise CheckpointError(f"{shape[dim]} {what} cannot be divided among {size} devices{units}")
    own = shape[dim] // size
    return range(rank * own, (rank + 1) * own)


def fill(matrix_NK: Tensor, parts: Sequence[StoredWeight]) -> None:
    """Write the rows of these parts, one after the other, into a dense matrix."""
    for rows, part in zip(matrix_NK.split_with_sizes([part.shape[0] for part in parts]), parts, strict=True):
        part.fill(rows)


def filled(parts: Sequence[StoredWeight], form: WeightFormat) -> Tensor:
    """The rows of these parts, one after the other, as one new dense matrix."""
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    matrix_NK = torch.empty(shape, dtype=form.dtype, device=form.device)
    fill(matrix_NK, parts)
    return matrix_NK


def make_weights(parts: Iterable[StoredWeight], form: WeightFormat) -> list[LinearWeight]:
    """Weights whose outputs, side by side, are those of ``parts`` in order; neighbours that can be one weight are."""
    weights: list[LinearWeight] = []
    left: list[StoredWeight] = []
    """Neighbours that are to be made dense together."""
    for _, group in itertools.groupby(parts, lambda part: part.layout):
        first, *others = group
        joined = first.join(others) if others else first
        packed = joined.pack(form)
        if packed is None:
            left.append(joined)
            continue
        weights += [*_dense(left, form), packed]
        left = []
    return weights + _dense(left, form)


def _dense(parts: Sequence[StoredWeight], form: WeightFormat) -> list[LinearWeight]:
    """The parts as one dense weight, none if there are no parts."""
    if not parts:
        return []
    return [DenseWeight(parts[0].dense(form) if len(parts) == 1 else filled(parts, form))]
