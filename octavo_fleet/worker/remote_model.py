"""A model that a worker computes: the forward pass goes over a connection and gives logits, which are sampled here.

Shapes: T rows, S sequences, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo_fleet.worker.connection import SequencePart, WorkerConnection, WorkerError

DTYPES = (torch.float32, torch.bfloat16)
"""Data types by their number in ``LogitsType``."""


class RemoteModel:
    """A ``CausalLM`` without layers here: its forward pass gives logits in place of the last layer's output."""

    def __init__(self, connection: WorkerConnection) -> None:
        description = connection.description
        self._connection = connection
        self._vocab_size: int = description.vocab_size
        self._dtype = DTYPES[description.logits_type]
        self._block_size: int = description.block_size

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        rows: PagedRows,
        given_TD: Tensor | None = None,
    ) -> Tensor:
        """Logits in float32: [R, V] if the rows have logits indices, else [T, V].

        Raises ``WorkerError`` or ``WorkerLost``.
        """
        firsts = rows.cu_seqlens_q.tolist()
        token_ids, positions = token_ids_T.tolist(), positions_T.tolist()
        tables_SB, lens = rows.groups[0].block_tables_SB.numpy(), rows.seq_lens_S.tolist()
        counts = _num_logits(rows, len(token_ids))
        parts = [
            SequencePart(
                positions[first],
                token_ids[first:end],
                tables_SB[index, : -(-lens[index] // self._block_size)].tolist(),
                counts[index],
            )
            for index, (first, end) in enumerate(itertools.pairwise(firsts))
            if end > first
        ]
        num_rows, content = sum(counts), self._connection.step(parts)
        row_bytes = self._vocab_size * self._dtype.itemsize
        if len(content) != num_rows * row_bytes:
            raise WorkerError(
                f"worker {self._connection.address}: {len(content):,} bytes of logits instead of {num_rows} x "
                f"{row_bytes:,}, for a vocabulary of {self._vocab_size:,} and {str(self._dtype).removeprefix('torch.')}"
            )
        logits_RV = torch.frombuffer(bytearray(content), dtype=self._dtype).view(num_rows, self._vocab_size)
        return logits_RV.float()

    def logits(self, x_RV: Tensor) -> Tensor:
        """The forward pass has computed them."""
        return x_RV

    def norm(self, x_TV: Tensor) -> Tensor:
        """There is nothing to normalise."""
        return x_TV


def _num_logits(rows: PagedRows, num_rows: int) -> list[int]:
    """For each sequence, how many of its rows have logits; they are always its last."""
    firsts_S = rows.cu_seqlens_q.numpy()
    if rows.logits_indices_R is None:
        ends = np.minimum(firsts_S, num_rows)
    else:
        ends = np.searchsorted(rows.logits_indices_R.numpy(), firsts_S)
    counts: list[int] = np.diff(ends).tolist()
    return counts
