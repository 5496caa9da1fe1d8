"""A step from its tensors to tokens: forward pass, logits, sampling, log-probabilities.

Shapes: T rows, S sequences, R sampled rows, W numbers of a report, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.layers.lora import AdapterRows
from octavo.models.registry import CausalLM
from octavo.ops.attention import PagedRows
from octavo.runtime.pooled import ChunkPooler
from octavo.runtime.sampling_state import SamplingState
from octavo.runtime.step_views import StepTensors
from octavo.runtime.vocabulary import WHOLE, Vocabulary
from octavo.steps.messages import PromptRows, Step, StepResult
from octavo.steps.shapes import StepShape

Forward = Callable[[Tensor, Tensor, PagedRows], Tensor]
"""The last layer's output for token ids [T] at positions [T], valid until the next call: [T, D], or [R, D] if the rows
have logits indices."""

LOGPROB_ROWS = 128
"""Prompt positions whose logits are in memory at once."""


class Computed(NamedTuple):
    """A step's results on the device."""

    tokens_R: Tensor | None
    """int32; ``None`` if the step samples nothing."""
    reports_RW: Tensor | None
    x_TD: Tensor
    """The last layer's output; of all rows if the message needs them, else [R, D]."""


class StepProgram:
    """The computation of a step on its device, which never synchronises with the host."""

    def __init__(
        self, model: CausalLM, forward: Forward, state: SamplingState, adapter_rows: AdapterRows | None = None
    ) -> None:
        self.model = model
        self.state = state
        self._forward = forward
        self._adapter_rows = adapter_rows

    def __call__(self, step: StepTensors, shape: StepShape, message: Step | None = None) -> Computed:
        """Compute a step of this shape. Without a ``message``, reports have the maximum width and the step depends on
        its tensors alone, so that it can be captured in a graph."""
        rows, extras, vocabulary = step.rows, step.extras, self.state.vocabulary
        if extras is not None:
            self.state.remember(step, extras)
        indices_R = step.logits_indices_R
        if indices_R is None and shape.max_query_len > 1:
            indices_R = (rows.cu_seqlens_q[1:] - 1).clamp(min=0)
        # Adapter numbers cover all rows of a step, so with adapters the last layer keeps all rows.
        keeps_all = step.adapters_T is not None or (message is not None and message.needs_all_rows)
        if indices_R is not None and not keeps_all:
            rows = replace(rows, logits_indices_R=indices_R)
        with self._adapted(step):
            x_TD = self._forward(step.token_ids_T, step.positions_T, rows)
        if message is not None and not message.is_sampled:
            return Computed(None, None, x_TD)
        x_RD = x_TD if indices_R is rows.logits_indices_R else x_TD[indices_R]
        logits_RV = self.model.logits(x_RD)
        if extras is None:
            return Computed(vocabulary.sample(logits_RV, step.params), None, x_TD)
        adjusted_RV = self.state.adjust(logits_RV, step, extras, () if message is None else message.masks)
        tokens_R = vocabulary.sample(adjusted_RV, step.params)
        num_top = self.state.most_top if message is None else message.num_top
        if num_top < 0:
            return Computed(tokens_R, None, x_TD)
        asked_R = tokens_R.masked_fill(extras.wants_logprobs_R == 0, -1)
        return Computed(tokens_R, vocabulary.report(logits_RV, asked_R, num_top), x_TD)

    def _adapted(self, step: StepTensors) -> contextlib.AbstractContextManager[None]:
        if step.adapters_T is None:
            return contextlib.nullcontext()
        assert self._adapter_rows is not None, "the model was loaded without adapters"
        return self._adapter_rows.of_rows(step.adapters_T)


class RowReader:
    """Reads a step's results to the host: tokens, accepted drafts, log-probabilities and pooled vectors."""

    def __init__(self, model: CausalLM, pooler: ChunkPooler, vocabulary: Vocabulary = WHOLE) -> None:
        self._model = model
        self._pooler = pooler
        self._vocabulary = vocabulary

    def result(self, message: Step, computed: Computed) -> tuple[StepResult, list[int]]:
        """The step's result, and the index of each sequence's last accepted sampled row; waits for the device."""
        num_samples = message.num_seqs + sum(map(len, message.drafts))
        tokens: list[int] = [] if computed.tokens_R is None else computed.tokens_R[:num_samples].tolist()
        accepted, last_rows = _accept(message, tokens)
        reports = b"" if computed.reports_RW is None else as_bytes(computed.reports_RW[:num_samples])
        x_TD = computed.x_TD
        prompts = [self._prompt_reports(prompt, x_TD[prompt.first_row :]) for prompt in message.prompts]
        values = [
            self._pooler.take(rows, x_TD[rows.first_row : rows.first_row + rows.num_rows]) for rows in message.pooled
        ]
        return StepResult(tokens, accepted, reports, prompts, values), last_rows

    def _prompt_reports(self, prompt: PromptRows, x_TD: Tensor) -> bytes | None:
        """Reports of a prompt's rows, ``LOGPROB_ROWS`` at a time; ``None`` if a logit is not finite."""
        parts = []
        for first in range(0, len(prompt.tokens), LOGPROB_ROWS):
            tokens = prompt.tokens[first : first + LOGPROB_ROWS]
            logits_RV = self._model.logits(x_TD[first : first + len(tokens)])
            if not self._vocabulary.are_finite(logits_RV):
                return None
            tokens_R = torch.tensor(tokens, dtype=torch.int32, device=logits_RV.device)
            parts.append(as_bytes(self._vocabulary.report(logits_RV, tokens_R, prompt.num_top)))
        return b"".join(parts)


def _accept(message: Step, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Accept drafts up to the first that differs from the sampled token, so that output is the same as without drafts.

    For each sequence, the number of accepted drafts, and the index of the sampled row after them.
    """
    if not message.drafts:
        return [], list(range(message.num_seqs))
    accepted, last_rows, row = [], [], 0
    for drafts in message.drafts:
        num_accepted = 0
        while num_accepted < len(drafts) and tokens[row + num_accepted] == drafts[num_accepted]:
            num_accepted += 1
        accepted.append(num_accepted)
        last_rows.append(row + num_accepted)
        row += len(drafts) + 1
    return accepted, last_rows


def as_bytes(values: Tensor) -> bytes:
    """The raw bytes of a tensor, in memory order."""
    return values.cpu().contiguous().numpy().tobytes()
