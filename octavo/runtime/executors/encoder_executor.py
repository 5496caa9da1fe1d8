"""The executor for encoder models: each text is computed in one pass, without a KV cache.

Shapes: T tokens of the step, S texts, D model.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CANCELLATIONS, RunnerError
from octavo.models.bert import BertModel, PackedTexts
from octavo.models.pooling import Pooling
from octavo.runtime.executors.pooler import as_vectors, to_length_one
from octavo.runtime.executors.replies import Done, FailedReply
from octavo.steps.messages import Encode, EncoderText, Message, Reply

logger = logging.getLogger(__name__)


class EncoderExecutor:
    """Computes an embedding for each text, or a score if the model is a cross-encoder (``is_cross_encoder``)."""

    runs_ahead = False

    def __init__(self, model: BertModel, pooling: Pooling, device: torch.device) -> None:
        self._model = model
        self._pooling = pooling
        self._device = device

    def send(self, message: Message) -> Reply[Any]:
        """See ``Executor``; the only supported message is ``Encode``."""
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
        x_TD = self._model.forward(self._texts(texts, ends))
        if self._model.config.is_cross_encoder:
            return as_vectors(self._model.scores(self._firsts(x_TD, ends)).unsqueeze(1))
        values_SD = self._pooled(x_TD, ends)
        return as_vectors(to_length_one(values_SD) if self._pooling.normalizes else values_SD)

    def _texts(self, texts: list[EncoderText], ends: list[int]) -> PackedTexts:
        ids: list[int] = []
        positions: list[int] = []
        types: list[int] = []
        for text in texts:
            length = len(text.tokens)
            ids += text.tokens
            positions += range(length)
            first = length if text.second_start is None else text.second_start
            types += [0] * first + [1] * (length - first)
        ids_T, positions_T, types_T = torch.tensor([ids, positions, types], dtype=torch.int64, device=self._device)
        return PackedTexts(ids_T, positions_T, types_T, ends)

    def _firsts(self, x_TD: Tensor, ends: list[int]) -> Tensor:
        return x_TD[[0, *ends[:-1]]]

    def _pooled(self, x_TD: Tensor, ends: list[int]) -> Tensor:
        if self._pooling.kind == "cls":
            return self._firsts(x_TD, ends).float()
        if self._pooling.kind == "last":
            return x_TD[[end - 1 for end in ends]].float()
        texts = x_TD.float().tensor_split(ends[:-1])
        return torch.stack([text_LD.mean(dim=0) for text_LD in texts])
