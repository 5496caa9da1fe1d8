"""The stages of a weight between checkpoint and kernel.

A ``StoredWeight`` is one matrix as stored in the checkpoint. It is sharded, joined and reordered in that format, and
then becomes a ``LinearWeight``: packed if there is a kernel for its format, dense otherwise.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo import ops
from octavo.errors import CheckpointError
from octavo.ops.linear.linear import PLAIN, Fused
from octavo.plugins import GPU

Order = npt.NDArray[np.int64]
"""For each row of the result, the index of its row in the matrix."""
DENSE_FORMATS = frozenset({"float32", "bfloat16", "float16"})
"""Names of the formats of unquantised weights."""
_WEIGHTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class WeightFormat:
    """The format of loaded weights. ``dtype`` is also that of activations."""

    dtype: torch.dtype
    device: torch.device
    packs: bool = False
    """Whether weights of fewer bits than ``dtype`` stay so if there is a kernel; otherwise all become ``dtype``."""
    quantization: str | None = None
    """To what unquantised linear maps are quantised while they are loaded: "fp8", "int8" or "int4"; see
    ``formats.online_quantization``."""
    quantizes_head: bool = False
    """Whether the map to logits, and an embedding that is tied to it, becomes int8 while loading, if it is not
    quantised."""

    is_quantised: bool = False
    """Whether weights are quantised, in the checkpoint or while loading."""

    keeps_experts_whole: bool = False
    """Whether several ranks divide the experts of a mixture among them, and not each expert."""
    keeps_attention_whole: bool = False
    """Whether each of several ranks has all of a layer's attention, for sequences of its own."""
    num_spare_experts: int = 0
    """Copies of experts that each rank then holds besides."""
    outlined_for: str | None = None
    """Type of the device that weights on the "meta" device stand for; see ``models.meta_model``."""

    @property
    def kernel_device(self) -> str:
        """Type of the device whose kernels compute with the weights."""
        return self.outlined_for or self.device.type

    @property
    def kv_dtype(self) -> torch.dtype:
        """The default dtype of keys and values: 16 bits on CPUs next to packed weights of 8 bits or fewer."""
        return torch.float16 if self.packs and self.is_quantised and self.device.type == "cpu" else self.dtype


class Sized(Protocol):
    """Numbers of one format in memory."""

    @property
    def format(self) -> str:
        """Name of the numbers' format, such as "int4" or "bfloat16", for reports of memory."""
        ...

    @property
    def num_bytes(self) -> int: ...


class LinearWeight(Sized, Protocol):
    """A matrix [N, K] that a kernel computes with."""

    @property
    def dense_NK(self) -> Tensor | None:
        """The matrix, if it is dense."""
        ...

    def apply(self, x_TK: Tensor, fused: Fused = PLAIN) -> Tensor:
        """``x @ weight.T`` with what is fused, in the dtype of x; see ``ops.linear``."""
        ...

    def rows(self, ids_T: Tensor) -> Tensor:
        """Dense rows [T, K] by index (int64), for embedding lookups.

        On a CPU raises ``IndexError`` for an index out of range.
        """
        ...


class StoredWeight(Protocol):
    """One matrix [N, K] as stored in a checkpoint, on the host and lazily read if the file allows.

    ``rows``, ``join`` and ``shard`` keep values exactly: nothing is rounded. They raise ``CheckpointError`` for
    operations that the format does not support.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def layout(self) -> Hashable:
        """Weights of equal layouts can be joined."""
        ...

    def placed(self, device: torch.device) -> Self:
        """The matrix on the device of kernels, if that is faster than to order and join its rows first."""
        return self

    def rows(self, order: Order) -> Self:
        """These rows, in this order."""
        ...

    def join(self, others: Sequence[Self]) -> Self:
        """The rows of this weight, then those of the others, which must have equal layouts and column counts."""
        ...

    @property
    def column_block(self) -> int:
        """Columns of which a part has all or none."""
        return 1

    def shard(self, dim: int, rank: int, size: int, unit: int = 1) -> Self:
        """Part ``rank`` of ``size`` parts of the rows (``dim`` 0) or columns (1); see ``shard_range``."""
        ...

    def fill(self, out_NK: Tensor) -> None:
        """Write the dense matrix to a tensor of any floating-point dtype on any device."""
        ...

    def dense(self, form: WeightFormat) -> Tensor:
        """The dense matrix in the format's dtype on its device; the stored tensor itself if it already matches."""
        return filled([self], form)

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        """The matrix packed for a kernel of the device, ``None`` if it must be dequantised.

        On the "meta" device it has the size of what kernels of ``form.kernel_device`` get, and no content.
        """
        ...


@dataclass(frozen=True)
class DenseWeight:
    """A weight as a dense matrix."""

    weight_NK: Tensor
    dtype: torch.dtype | None = None
    """Of activations, where it is not the weight's."""

    @property
    def format(self) -> str:
        return dtype_name(self.weight_NK.dtype)

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes

    @property
    def dense_NK(self) -> Tensor | None:
        return self.weight_NK.to(self.dtype or self.weight_NK.dtype)

    def apply(self, x_TK: Tensor, fused: Fused = PLAIN) -> Tensor:
        return ops.linear(x_TK, self.weight_NK, fused)

    def rows(self, ids_T: Tensor) -> Tensor:
        return ops.embedding(ids_T, self.weight_NK, self.dtype)


class Packed(Sized, Protocol):
    """A matrix [N, K] in the form of a product's kernel."""

    def rows(self, ids_T: Tensor) -> Tensor:
        """Dense rows [T, K] by index, in any dtype."""
        ...


P = TypeVar("P", bound=Packed)


@dataclass(frozen=True, eq=False)
class PackedWeight(Generic[P]):
    """A weight packed for the kernels of ``product``, which has the arguments of ``ops.linear``."""

    packed: P
    dtype: torch.dtype
    """Of activations."""
    product: ClassVar[Callable[..., Tensor]]

    @property
    def format(self) -> str:
        return self.packed.format

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes

    @property
    def dense_NK(self) -> Tensor | None:
        return None

    def apply(self, x_TK: Tensor, fused: Fused = PLAIN) -> Tensor:
        return self.product(x_TK, self.packed, fused)

    def rows(self, ids_T: Tensor) -> Tensor:
        return self.packed.rows(ids_T).to(self.dtype)


@dataclass(frozen=True)
class OutlinedWeight:
    """A packed weight without content: its size, for ``models.meta_model``."""

    shape: tuple[int, int]
    format: str
    num_bytes: int
    """About: packed scales may take two or four bytes."""
    dense_NK: Tensor | None = None

    def apply(self, x_TK: Tensor, fused: Fused = PLAIN) -> Tensor:
        raise NotImplementedError("an outline has no numbers")

    rows = apply


@dataclass(frozen=True)
class DenseStored(StoredWeight):
    """An unquantised matrix: the concatenated rows of one or more tensors."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]

    @property
    def layout(self) -> Hashable:
        return self.parts[0].dtype

    def rows(self, order: Order) -> DenseStored:
        return DenseStored((chosen_rows(self._one(), order),))

    def join(self, others: Sequence[DenseStored]) -> DenseStored:
        return DenseStored(tuple(itertools.chain(self.parts, *(other.parts for other in others))))

    def shard(self, dim: int, rank: int, size: int, unit: int = 1) -> DenseStored:
        own = shard_range(self.shape, dim, rank, size, unit=unit)
        return DenseStored((self._one().narrow(dim, own.start, len(own)),))

    def fill(self, out_NK: Tensor) -> None:
        for rows, part in zip(row_parts(out_NK, [len(part) for part in self.parts]), self.parts, strict=True):
            rows.copy_(part)

    def dense(self, form: WeightFormat) -> Tensor:
        if len(self.parts) > 1:
            return super().dense(form)
        return self.parts[0].to(device=form.device, dtype=form.dtype).contiguous()

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        """On a CPU, 16 bits stay 16 bits: they are widened in registers, exactly, and half as many bytes are read."""
        dtype, K = self.parts[0].dtype, self.shape[1]
        if not form.packs or form.kernel_device == GPU or form.dtype != torch.float32 or dtype.itemsize != 2:
            return None
        if K % 16:
            return None
        return DenseWeight(self._one().contiguous(), form.dtype)

    def _one(self) -> Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def bytes_by_format(weights: Iterable[Sized]) -> Counter[str]:
    """Bytes of weights by the name of their format."""
    total: Counter[str] = Counter()
    for weight in weights:
        total[weight.format] += weight.num_bytes
    return total


def shard_range(shape: tuple[int, int], dim: int, rank: int, size: int, block: int = 1, unit: int = 1) -> range:
    """The rows (``dim`` 0) or columns (1) of part ``rank`` of ``size``: equal multiples of ``block``, or, where there
    is a ``unit`` that ``block`` divides, whole units, of which parts have equally many or one more.

    Raises ``CheckpointError`` for a shape that has no such parts.
    """
    if shape[dim] % (unit if unit > 1 else size * block) or shape[dim] < size * unit:
        what = ("rows", "columns")[dim]
        blocks = f" in whole blocks of {max(block, unit)}" if max(block, unit) > 1 else ""
        raise CheckpointError(f"{shape[dim]} {what} cannot be divided among {size} devices{blocks}")
    count = shape[dim] // unit
    begin, end = (-(-part * count // size) * unit for part in (rank, rank + 1))  # no part has more than the first
    return range(begin, end)


def row_slices(shape: tuple[int, int]) -> Iterator[slice]:
    """Slices that cover all rows, a few million weights at a time, which bounds temporary memory."""
    rows, columns = shape
    step = max(1, _WEIGHTS_AT_ONCE // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def row_parts(matrix_NK: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Views of so many rows each, one after the other; not those of one split, to which autograd lets nobody write."""
    ends = itertools.accumulate(sizes)
    return (matrix_NK[end - size : end] for size, end in zip(sizes, ends, strict=True))


def chosen_rows(matrix: Tensor, order: Order) -> Tensor:
    """Copies of these rows. Not by indexing: on the "meta" device that imports torch's compiler, for longer than the
    outline of a model takes otherwise."""
    return matrix.index_select(0, torch.from_numpy(order).to(matrix.device))


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of these, concatenated; not by ``torch.cat``, for the reason of ``chosen_rows``."""
    rows = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for own, part in zip(row_parts(rows, [len(part) for part in parts]), parts, strict=True):
        own.copy_(part)
    return rows


def fill(matrix_NK: Tensor, parts: Sequence[StoredWeight]) -> None:
    """Write the rows of these parts, concatenated, to a dense matrix."""
    for rows, part in zip(row_parts(matrix_NK, [part.shape[0] for part in parts]), parts, strict=True):
        part.fill(rows)


def filled(parts: Sequence[StoredWeight], form: WeightFormat) -> Tensor:
    """The rows of these parts, concatenated, as a new dense matrix."""
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    matrix_NK = torch.empty(shape, dtype=form.dtype, device=form.device)
    fill(matrix_NK, parts)
    return matrix_NK


def make_weights(parts: Iterable[StoredWeight], form: WeightFormat) -> list[LinearWeight]:
    """Weights whose concatenated outputs are those of ``parts`` in order; compatible neighbours are joined."""
    weights: list[LinearWeight] = []
    left: list[StoredWeight] = []
    """Neighbours to be dequantised into one dense weight."""
    for _, group in itertools.groupby(parts, lambda part: part.layout):
        first, *others = group
        joined = first.join(others) if others else first
        packed = joined.pack(form)
        if packed is None:
            left.append(joined)
            continue
        if form.device.type == "meta" and packed.dense_NK is None:
            packed = OutlinedWeight(joined.shape, packed.format, packed.num_bytes)
        weights += [*_dense(left, form), packed]
        left = []
    return weights + _dense(left, form)


def _dense(parts: Sequence[StoredWeight], form: WeightFormat) -> list[LinearWeight]:
    """The parts as one dense weight; an empty list if there are no parts."""
    if not parts:
        return []
    return [DenseWeight(parts[0].dense(form) if len(parts) == 1 else filled(parts, form))]
