"""A plan as flat tensors.

Shapes: T tokens of the step, S sequences, B blocks of the longest table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.attention import GroupRows, PagedRows
from octavo.types import GroupBlocks, Plan, Sequence

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What one forward pass computes: the rows of all sequences, one after the other."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    rows: PagedRows
    first_rows: list[int]
    """Where each sequence's rows begin, and at the end their number."""


@dataclass(slots=True)
class _Table:
    """A sequence's block table in one KV group as an array that is only extended while its version stays."""

    version: int
    length: int = 0
    blocks: Ints = field(default_factory=lambda: np.zeros(16, dtype=np.int32))

    def update(self, held: GroupBlocks) -> None:
        length = len(held.block_table)
        if self.version != held.table_version or length < self.length:
            self.version, self.length = held.table_version, 0
        if length == self.length:
            return
        if length > len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.zeros(length, dtype=np.int32)])
        self.blocks[self.length : length] = held.block_table[self.length :]
        self.length = length


class BatchBuilder:
    """Makes forward batches. It keeps the block tables of live sequences as arrays between steps."""

    def __init__(self, block_size: int, device: torch.device, num_groups: int = 1) -> None:
        self.block_size = block_size
        self.device = device
        self.num_groups = num_groups
        self._tables: WeakKeyDictionary[Sequence, list[_Table]] = WeakKeyDictionary()

    def build(self, plan: Plan, wanted: list[int] | None = None) -> ForwardBatch:
        """Tensors for a plan of which no item is stale; ``wanted`` rows are looked at, if not all.

        A ``None`` among the tokens is looked up in its sequence, where the step that sampled it is committed.
        """
        token_ids: list[int] = []
        for item in plan:
            token_ids.extend(_known_tokens(item.seq, item.start, item.tokens))
            token_ids.extend(item.drafts)
        starts = np.array([item.start for item in plan], dtype=np.int64)
        query_lens = np.array([len(item.tokens) + len(item.drafts) for item in plan], dtype=np.int64)
        first_rows = [0, *itertools.accumulate(query_lens.tolist())]
        seq_lens = starts + query_lens
        of_row = np.repeat(np.arange(len(plan)), query_lens)
        positions = np.arange(len(token_ids)) - np.array(first_rows)[of_row] + starts[of_row]
        begins = torch.tensor(first_rows, dtype=torch.int32, device=self.device)
        lengths = self._tensor(seq_lens.astype(np.int32))
        most = int(query_lens.max())
        groups = tuple(self._group_rows(plan, group, seq_lens, of_row, positions) for group in range(self.num_groups))
        indices_R = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=self.device)
        return ForwardBatch(
            torch.tensor(token_ids, dtype=torch.int64, device=self.device),
            self._tensor(positions),
            PagedRows(groups, begins, lengths, most, indices_R),
            first_rows,
        )

    def _group_rows(
        self, plan: Plan, group: int, seq_lens: npt.NDArray[np.int64], of_row: Indices, positions: Indices
    ) -> GroupRows:
        """The slot of each row, and the block tables, in one KV group."""
        tables_SB = self._block_tables(plan, group, seq_lens)
        slots = tables_SB[of_row, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        return GroupRows(self._tensor(slots), self._tensor(tables_SB))

    def _block_tables(self, plan: Plan, group: int, seq_lens: npt.NDArray[np.int64]) -> Ints:
        num_blocks: list[int] = (-(-seq_lens // self.block_size)).tolist()
        tables_SB = np.zeros((len(plan), max(num_blocks)), dtype=np.int32)
        for row, item, count in zip(tables_SB, plan, num_blocks, strict=True):
            tables = self._tables.get(item.seq)
            if tables is None:
                tables = self._tables[item.seq] = [_Table(held.table_version) for held in item.seq.groups]
            table = tables[group]
            table.update(item.seq.groups[group])
            assert count <= table.length, f"sequence {item.seq.id} has fewer blocks than its tokens need"
            row[:count] = table.blocks[:count]
        return tables_SB

    def _tensor(self, values: npt.NDArray[np.int64] | Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _known_tokens(seq: Sequence, start: int, tokens: tuple[int | None, ...]) -> list[int]:
    known = [seq.tokens[start + i] if token is None else token for i, token in enumerate(tokens)]
    assert None not in known, f"sequence {seq.id} is computed before its token is committed"
    return known  # type: ignore[return-value]
