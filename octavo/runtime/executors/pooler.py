"""Pooling: from the vectors of a text's tokens to its embedding or score.

Shapes: T tokens, S texts, D model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.pooling import Pooling
from octavo.models.registry import CausalLM
from octavo.steps.messages import PooledRows


def as_vectors(values_SD: Tensor) -> list[bytes | None]:
    """Each row as float32 bytes; ``None`` for a row with a number that is not finite."""
    rows_SD = values_SD.to(device="cpu", dtype=torch.float32)
    are_finite = rows_SD.isfinite().all(dim=-1).tolist()
    return [row.numpy().tobytes() if is_finite else None for row, is_finite in zip(rows_SD, are_finite, strict=True)]


def to_length_one(vectors_SD: Tensor) -> Tensor:
    """Normalise each row to length 1; a zero vector stays zero."""
    return torch.nn.functional.normalize(vectors_SD, dim=-1)


class ChunkPooler:
    """Pools texts that a decoder computes in chunks (chunked prefill).

    For mean pooling, the sum of the normalised rows up to the end of each chunk is kept, so that a chunk that is
    recomputed continues from the sum before it.
    """

    def __init__(self, model: CausalLM, pooling: Pooling) -> None:
        self._model = model
        self._pooling = pooling
        self._sums: dict[int, dict[int, Tensor]] = {}
        """Batch index to position to the sum of the rows before that position."""

    def take(self, rows: PooledRows, x_TD: Tensor) -> bytes | None:
        """Add a chunk's rows of the last layer's output. For the last chunk, the text's vector as float32 bytes, or
        ``None`` if it is not finite."""
        if self._pooling.kind == "mean":
            sum_D = self._model.norm(x_TD).double().sum(dim=0)
            if rows.start:
                sum_D += self._sums[rows.index][rows.start]
            else:
                self._sums[rows.index] = {}
            end = rows.start + rows.num_rows
            self._sums[rows.index][end] = sum_D
            vector_D = sum_D / end
        else:
            vector_D = self._model.norm(x_TD[-1:])[0].float()
        if not rows.is_last:
            return None
        vectors_SD = vector_D.unsqueeze(0)
        return as_vectors(to_length_one(vectors_SD) if self._pooling.normalizes else vectors_SD)[0]
