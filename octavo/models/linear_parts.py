"""The matrices of a checkpoint within a model's linear maps, for LoRA adapters.

Shapes: K inputs, N outputs, R rank of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.quant.stored.shard import Section, Shard
from octavo.quant.stored.stored_weight import DenseStored, Order, StoredWeight, WeightFormat


class MatrixRows(NamedTuple):
    """A matrix of the checkpoint, as rows of a linear map's weight."""

    name: str
    sections: Sequence[Section]
    order: Order | None = None
    """Index of the stored row for each row, if rows are reordered."""
    may_have_bias: bool = True
    """Whether it has a bias where the matrices beside it have."""

    @property
    def num_rows(self) -> int:
        return sum(section.num_rows for section in self.sections)


class MapPart(NamedTuple):
    """The position of a checkpoint matrix's outputs within a (possibly fused) linear map of the model.

    ``start``, ``size`` and ``num_inputs`` are those of this device's shard.
    """

    linear: Linear
    start: int
    size: int
    num_inputs: int
    rows: MatrixRows
    """The rows of the unsharded matrix."""
    input_shard: Shard
    """How the inputs are divided."""
    shard: Shard

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the unsharded matrix."""
        return self.rows.num_rows, self.num_inputs * self.input_shard.size

    def own_update(self, down_RK: Tensor, up_NR: Tensor) -> tuple[Tensor, Tensor]:
        """This device's part of a low-rank update of the unsharded matrix."""
        form = WeightFormat(up_NR.dtype, up_NR.device)
        down = self.input_shard.part(self.rows.name, DenseStored((down_RK,)), 1)
        up: StoredWeight = DenseStored((up_NR,))
        if self.rows.order is not None:
            up = up.rows(self.rows.order)
        return down.dense(form), self.shard.sections(self.rows.name, up, self.rows.sections).dense(form)
