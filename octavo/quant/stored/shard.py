"""Tensor-parallel sharding: the part of each matrix that a device holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.errors import CheckpointError
from octavo.quant.stored.stored_weight import StoredWeight, shard_range


class Section(NamedTuple):
    """Rows of a matrix that are sharded separately, such as the queries of a fused matrix."""

    num_rows: int
    num_units: int
    """Number of indivisible units, such as heads. If there are fewer than devices, several devices hold the same."""


class Shard(NamedTuple):
    """The shard of one device. Methods raise ``CheckpointError`` naming the matrix."""

    rank: int
    size: int

    def part(self, name: str, stored: StoredWeight, dim: int, unit: int = 1) -> StoredWeight:
        """This device's part of the rows (``dim`` 0) or columns (1); see ``shard_range``."""
        if self.size == 1:
            return stored
        try:
            return stored.shard(dim, *self, unit)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def own_rows(self, name: str, count: int, unit: int) -> range:
        """Which of so many rows ``part`` takes."""
        try:
            return shard_range((count, 1), 0, *self, unit=unit)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def sections(self, name: str, stored: StoredWeight, sections: Sequence[Section]) -> StoredWeight:
        """This device's rows of each section, concatenated."""
        if self.size == 1:
            return stored
        pieces, start = [], 0
        for section in sections:
            rows = stored.rows(np.arange(start, start + section.num_rows))
            pieces.append(self._units(name, rows, section.num_units))
            start += section.num_rows
        return pieces[0].join(pieces[1:])

    def vocabulary(self, table: StoredWeight) -> StoredWeight:
        """This device's rows of a vocabulary table; the last devices have fewer if it does not divide evenly."""
        if self.size == 1:
            return table
        own = self.tokens(table.shape[0])
        return table.rows(np.arange(own.start, own.stop))

    def tokens(self, vocab_size: int) -> range:
        """This device's token ids, from a multiple of 8 so that masks of bits can be cut."""
        most = -(-vocab_size // (8 * self.size)) * 8
        if vocab_size <= (self.size - 1) * most:
            raise CheckpointError(f"a vocabulary of {vocab_size} cannot be divided among {self.size} devices")
        return range(self.rank * most, min((self.rank + 1) * most, vocab_size))

    def num_units(self, num_units: int) -> int:
        """Number of indivisible units that this device holds, as in ``sections``."""
        return num_units // min(self.size, num_units)

    def _units(self, name: str, rows: StoredWeight, num_units: int) -> StoredWeight:
        parts = min(self.size, num_units)
        if num_units % parts or self.size % parts:
            units = f"{num_units} parts of {rows.shape[0] // num_units} rows"
            raise CheckpointError(f"{name}: {units} cannot be divided among {self.size} devices")
        return rows.shard(0, self.rank * parts // self.size, parts)


UNSHARDED = Shard(0, 1)
"""One device that holds everything."""
