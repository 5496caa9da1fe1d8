"""From the vectors of a text's tokens to what the request asked for: the text's own vector, or a score.

Shapes: T tokens, S texts, D model.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from octavo.models.pooling import Pooling
from octavo.models.registry import CausalLM
from octavo.runtime.sampler import NOT_NUMBERS
from octavo.types import Sampled, Scheduled, Sequence


def answer(values_SD: Tensor) -> list[Sampled]:
    """One result for each row, as float32 bytes; a row that has what is no number gets an error."""
    rows_SD = values_SD.to(device="cpu", dtype=torch.float32)
    are_numbers = rows_SD.isfinite().all(dim=-1).tolist()
    return [
        Sampled([], values=row.numpy().tobytes()) if is_number else Sampled([], error=NOT_NUMBERS)
        for row, is_number in zip(rows_SD, are_numbers, strict=True)
    ]


def to_length_one(vectors_SD: Tensor) -> Tensor:
    """The same directions; a vector of zeros stays."""
    return torch.nn.functional.normalize(vectors_SD, dim=-1)


class ChunkPooler:
    """The vectors of texts that a decoder computes in chunks.

    A mean is kept as sums of the normalised rows up to the end of each chunk, so that a chunk that has to be computed
    again finds the sum before it.
    """

    def __init__(self, model: CausalLM, pooling: Pooling) -> None:
        self._model = model
        self._pooling = pooling
        self._sums: WeakKeyDictionary[Sequence, dict[int, Tensor]] = WeakKeyDictionary()

    def take(self, item: Scheduled, x_TD: Tensor) -> Sampled:
        """Take the rows of a chunk, as the last layer gives them; with the last chunk, the text's vector."""
        if self._pooling.kind == "mean":
            sum_D = self._model.norm(x_TD).double().sum(dim=0)
            sums = self._sums.setdefault(item.seq, {})
            if item.start:
                sum_D += sums[item.start]
            end = item.start + len(item.tokens)
            sums[end] = sum_D
            vector_D = sum_D / end
        else:
            vector_D = self._model.norm(x_TD[-1:])[0].float()
        if not item.samples:
            return Sampled([])
        vectors_SD = vector_D.unsqueeze(0)
        return answer(to_length_one(vectors_SD) if self._pooling.normalizes else vectors_SD)[0]
