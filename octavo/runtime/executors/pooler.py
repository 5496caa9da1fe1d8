"""Pooling: from the vectors of a text's tokens to its embedding, its labels' logits, or those of its tokens.

Shapes: T tokens, S texts, D model, E embedding, L labels, C columns, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.models.labels import LabelHead
from octavo.models.pooling import Dense, Pooling
from octavo.models.registry import CausalLM
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.steps.messages import PooledRows
from octavo.types import Task

ROWS_AT_ONCE = 256
"""Whose logits of the whole vocabulary are in memory at once."""
TOKEN_TASKS = ("token_embed", "token_classify")


def as_vectors(values_SC: Tensor) -> list[bytes | None]:
    """Each row as float32 bytes; ``None`` for a row with a number that is not finite."""
    rows_SC = values_SC.to(device="cpu", dtype=torch.float32).numpy()  # whose checks keep no other thread waiting
    are_finite = np.isfinite(rows_SC).all(axis=-1).tolist()
    return [row.tobytes() if is_finite else None for row, is_finite in zip(rows_SC, are_finite, strict=True)]


class Pooler:
    """What is computed of a model's last vectors; ``load_format`` and ``form`` are those of the weights."""

    def __init__(
        self,
        pooling: Pooling,
        labels: LabelHead | None,
        load_format: str = "auto",
        form: WeightFormat | None = None,
        vocabulary: LabelHead | None = None,
    ) -> None:
        form = form or WeightFormat(torch.float32, torch.device("cpu"))
        self.pooling, self.labels, self.vocabulary = pooling, labels, vocabulary
        self.of_tokens = Dense(pooling.of_tokens, load_format, form)
        self.of_texts = Dense(pooling.of_texts, load_format, form)
        self.vectors = Dense(pooling.vectors or pooling.of_tokens, load_format, form)
        self.weights = Dense(pooling.weights, load_format, form)

    @property
    def kind(self) -> str:
        """Of which tokens a text's vector or logits are."""
        return self.pooling.kind if self.labels is None else self.labels.part.of

    def kept(self, task: Task, rows: slice) -> slice:
        """Of the rows of a text, those that the result of a task has."""
        if not self.pooling.vectors or task not in TOKEN_TASKS:
            return rows
        return slice(rows.start + 1, max(rows.start + 1, rows.stop - (task == "token_classify")))

    def of_rows(self, task: Task, x_TD: Tensor) -> Tensor:
        """The result of a task of tokens, or before pooling: [T, C], float32."""
        if task == "token_embed":
            return self.vectors(x_TD)
        if task == "token_classify" and self.labels is None:
            return self.weights(x_TD)
        if self.labels is not None and self.kind in ("each", "mean_logits"):
            return self.labels(x_TD)
        return self.of_tokens(x_TD) if self.labels is None else x_TD.float()

    def of_vocabulary(self, x_TD: Tensor) -> Tensor:
        """A text's number for each token of the vocabulary, of its rows: [V], float32; see ``Pooling.kind``."""
        assert self.vocabulary is not None
        starts = range(0, len(x_TD), ROWS_AT_ONCE)
        largest_V = [self.vocabulary(x_TD[start : start + ROWS_AT_ONCE]).amax(dim=0) for start in starts]
        return torch.stack(largest_V).amax(dim=0).relu_().log1p_()

    def of_pooled(self, x_SD: Tensor, dtype: torch.dtype) -> Tensor:
        """The result of a task of texts, from pooled rows in float32: [S, C], float32."""
        if self.labels is None:
            return self.of_texts(x_SD)
        return x_SD if self.kind == "mean_logits" else self.labels(x_SD.to(dtype))


class ChunkPooler:
    """Pools texts that a decoder computes in chunks (chunked prefill).

    For mean pooling, the sum of each chunk's normalised rows is kept, and for tasks of tokens the result of each row.
    A chunk that is recomputed takes the place of what was kept of it.
    """

    def __init__(self, model: CausalLM, pooler: Pooler) -> None:
        self._model = model
        self._pooler = pooler
        self._kept: dict[int, dict[int, tuple[int, Tensor]]] = {}
        """Batch index to a chunk's first position to its end and what is kept of it."""

    def take(self, rows: PooledRows, x_TD: Tensor) -> bytes | None:
        """Add a chunk's rows of the last layer's output. For the last chunk, the result as float32 bytes, or
        ``None`` if it is not finite."""
        is_of_tokens = rows.task in TOKEN_TASKS
        end = rows.start + rows.num_rows
        if not (is_of_tokens or self._pooler.kind == "mean"):
            if not rows.is_last:
                return None
            pooled_SD = self._pooler.of_rows(rows.task, self._model.norm(x_TD[-1:]))
            return as_vectors(self._pooler.of_pooled(pooled_SD, x_TD.dtype))[0]
        of_rows_TC = self._pooler.of_rows(rows.task, self._model.norm(x_TD))
        kept = self._kept[rows.index] if rows.start else {}
        self._kept[rows.index] = kept
        kept[rows.start] = end, of_rows_TC if is_of_tokens else of_rows_TC.double().sum(dim=0, keepdim=True)
        if not rows.is_last:
            return None
        parts, start = [], 0
        while start < end:
            start, part = kept[start]
            parts.append(part)
        whole_TC = torch.cat(parts)
        if is_of_tokens:
            return as_vectors(whole_TC.reshape(1, -1))[0]
        pooled_SD = (whole_TC.sum(dim=0, keepdim=True) / end).float()
        return as_vectors(self._pooler.of_pooled(pooled_SD, x_TD.dtype))[0]
