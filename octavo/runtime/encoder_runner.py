"""Carries out plans with an encoder: whole texts in one pass, with nothing cached.

Shapes: T tokens of the step, S texts, D model.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from octavo.models.bert import BertModel, Texts
from octavo.models.pooling import Pooling
from octavo.runtime.model_runner import PendingStep
from octavo.runtime.pooled import answer, to_length_one
from octavo.types import Masks, Plan, Request, Sampled


class EncoderRunner:
    """Gives each text of a plan its vector, or its score if the model is a judge."""

    def __init__(self, model: BertModel, pooling: Pooling, device: torch.device) -> None:
        self._model = model
        self._pooling = pooling
        self._device = device

    def submit(self, plan: Plan) -> PendingStep:
        """Take a plan, in which every text is whole; the steps before it may still be without a result."""
        return PendingStep(self, plan)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a text that nobody asked for, so that no request waits for a compiler."""
        ids_T = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._model.forward(Texts(ids_T, ids_T, ids_T, [2]))

    def compute(self, plan: Plan, masks: Masks) -> list[Sampled]:
        """The results of a plan of which no item is stale."""
        assert all(item.start == 0 and item.samples for item in plan), "an encoder got a part of a text"
        requests = [item.seq.request for item in plan]
        ends = list(itertools.accumulate(len(request.prompt_tokens) for request in requests))
        x_TD = self._model.forward(self._texts(requests, ends))
        if self._model.config.is_judge:
            task, values_SD = "score", self._model.scores(self._firsts(x_TD, ends)).unsqueeze(1)
        else:
            task, values_SD = "embed", self._pooled(x_TD, ends)
            values_SD = to_length_one(values_SD) if self._pooling.normalizes else values_SD
        return [
            result if request.task == task else Sampled([], error=f"this model can {task}; it cannot {request.task}")
            for request, result in zip(requests, answer(values_SD), strict=True)
        ]

    def _texts(self, requests: list[Request], ends: list[int]) -> Texts:
        ids: list[int] = []
        positions: list[int] = []
        types: list[int] = []
        for request in requests:
            length = len(request.prompt_tokens)
            ids += request.prompt_tokens
            positions += range(length)
            first = length if request.second_start is None else request.second_start
            types += [0] * first + [1] * (length - first)
        ids_T, positions_T, types_T = torch.tensor([ids, positions, types], dtype=torch.int64, device=self._device)
        return Texts(ids_T, positions_T, types_T, ends)

    def _firsts(self, x_TD: Tensor, ends: list[int]) -> Tensor:
        return x_TD[[0, *ends[:-1]]]

    def _pooled(self, x_TD: Tensor, ends: list[int]) -> Tensor:
        if self._pooling.kind == "cls":
            return self._firsts(x_TD, ends).float()
        if self._pooling.kind == "last":
            return x_TD[[end - 1 for end in ends]].float()
        texts = x_TD.float().tensor_split(ends[:-1])
        return torch.stack([text_LD.mean(dim=0) for text_LD in texts])
