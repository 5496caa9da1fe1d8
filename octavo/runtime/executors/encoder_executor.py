"""The executor for encoder models: each text is computed in one pass, without a KV cache.

Shapes: T tokens of the step, S texts, D model.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.errors import CANCELLATIONS, RunnerError
from octavo.models.encoder import Encoder, PackedTexts
from octavo.models.model_adapters import ModelAdapters
from octavo.runtime.executors.host_executor import change_adapters
from octavo.runtime.executors.pooler import TOKEN_TASKS, Pooler, as_vectors
from octavo.runtime.replies import Done, FailedReply
from octavo.steps.messages import NO_ADAPTER, Encode, EncoderText, LoadAdapter, Message, Reply, UnloadAdapter
from octavo.types import Task

logger = logging.getLogger(__name__)


class EncoderExecutor:
    """Computes what each text's task asks for."""

    runs_ahead = False

    def __init__(
        self, model: Encoder, pooler: Pooler, device: torch.device, adapters: ModelAdapters | None = None
    ) -> None:
        self._model = model
        self._pooler = pooler
        self._device = device
        self._adapters = adapters

    def send(self, message: Message) -> Reply[Any]:
        """See ``Executor``; supported are ``Encode`` and those of adapters."""
        if isinstance(message, LoadAdapter | UnloadAdapter):
            return change_adapters(self._adapters, message)
        assert isinstance(message, Encode), f"an encoder does not support {type(message).__name__}"
        try:
            with torch.inference_mode():
                return Done(self._values(message.texts))
        except CANCELLATIONS:
            raise
        except BaseException as error:
            logger.exception("a forward pass of %d texts failed", len(message.texts))
            return FailedReply(RunnerError(f"the forward pass failed: {type(error).__name__}: {error}"))

    def _values(self, texts: list[EncoderText]) -> list[bytes | None]:
        ends = list(itertools.accumulate(len(text.tokens) for text in texts))
        x_TD = self._forward(texts, ends)
        values: list[bytes | None] = [None] * len(texts)
        for task in {text.task for text in texts}:
            chosen = [i for i, text in enumerate(texts) if text.task == task]
            spans = [self._pooler.kept(task, slice(ends[i] - len(texts[i].tokens), ends[i])) for i in chosen]
            for i, value in zip(chosen, self._results(task, x_TD, spans), strict=True):
                values[i] = value
        return values

    def _forward(self, texts: list[EncoderText], ends: list[int]) -> Tensor:
        packed = self._texts(texts, ends)
        if all(text.adapter == NO_ADAPTER for text in texts):
            return self._model.forward(packed)
        assert self._adapters is not None
        lengths = torch.tensor([len(text.tokens) for text in texts])
        adapters_T = torch.tensor([text.adapter for text in texts], dtype=torch.int32).repeat_interleave(lengths)
        with self._adapters.rows.of_rows(adapters_T.to(self._device)):
            return self._model.forward(packed)

    def _results(self, task: Task, x_TD: Tensor, spans: list[slice]) -> list[bytes | None]:
        """The results of one task for the texts with these rows."""
        kind = self._pooler.kind
        if task not in TOKEN_TASKS and kind in ("cls", "last"):
            at = [span.start if kind == "cls" else span.stop - 1 for span in spans]
            return as_vectors(self._pooler.of_pooled(self._pooler.of_rows(task, x_TD[at]), x_TD.dtype))
        if kind == "splade":
            return as_vectors(torch.stack([self._pooler.of_vocabulary(x_TD[span]) for span in spans]))
        lengths = [span.stop - span.start for span in spans]
        is_whole = sum(lengths) == len(x_TD)
        rows_TC = self._pooler.of_rows(task, x_TD if is_whole else torch.cat([x_TD[span] for span in spans]))
        if task in TOKEN_TASKS:
            return [as_vectors(of_tokens_TC.reshape(1, -1))[0] for of_tokens_TC in rows_TC.split_with_sizes(lengths)]
        return as_vectors(self._pooler.of_pooled(means(rows_TC, lengths), x_TD.dtype))

    def _texts(self, texts: list[EncoderText], ends: list[int]) -> PackedTexts:
        lengths = np.diff(ends, prepend=0)
        packed_3T = np.empty((3, ends[-1]), np.int64)
        packed_3T[0] = list(itertools.chain.from_iterable(text.tokens for text in texts))
        packed_3T[1] = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        firsts = [len(text.tokens) if text.second_start is None else text.second_start for text in texts]
        packed_3T[2] = packed_3T[1] >= np.repeat(firsts, lengths)
        ids_T, positions_T, types_T = torch.from_numpy(packed_3T).to(self._device)
        return PackedTexts(ids_T, positions_T, types_T, ends)


def means(rows_TC: Tensor, lengths: Sequence[int]) -> Tensor:
    """The mean [S, C] of the rows of each of S texts, which follow one another; sums are in float32."""
    offsets = torch.tensor([0, *itertools.accumulate(lengths[:-1])], device=rows_TC.device)
    return torch.nn.functional.embedding_bag(torch.arange(len(rows_TC), device=rows_TC.device), rows_TC, offsets)
