"""A step from its tensors to tokens: forward pass, logits, sampling, log-probabilities.

Shapes: T rows, S sequences, R sampled rows, W numbers of a report, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from octavo import ops
from octavo.layers.lora import AdapterRows
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import ImageRows, PagedRows, Span
from octavo.runtime.drafting.drafter import Drafter, Drafting
from octavo.runtime.drafting.optional_acceptance import Verify
from octavo.runtime.executors.embedding_pool import EmbeddingPool
from octavo.runtime.executors.pooler import ChunkPooler
from octavo.runtime.executors.routed_experts import RoutedExperts
from octavo.runtime.executors.sampling_state import SamplingState
from octavo.runtime.executors.step_views import StepTensors
from octavo.runtime.sharded_logits import WHOLE, ShardedVocabulary
from octavo.steps.graph_shapes import StepShape
from octavo.steps.messages import PromptRows, Step, StepResult

Forward = Callable[[Tensor, Tensor, PagedRows], Tensor]
"""The last layer's output for token ids [T] at positions [T], valid until the next call: [T, D], or [R, D] if the rows
have logits indices."""

Logits = Callable[[Tensor], Tensor]
"""See ``CausalLM.logits``; the result is valid until the next call."""

LOGPROB_ROWS = 128
"""Prompt positions whose logits are in memory at once."""


class DeviceResults(NamedTuple):
    """A step's results on the device."""

    tokens_R: Tensor | None
    """int32; ``None`` if the step samples nothing."""
    num_accepted_S: Tensor | None
    """int32; accepted drafts of each sequence, ``None`` if the step has no drafts."""
    reports_RW: Tensor | None
    x_TD: Tensor
    """The last layer's output; of all rows if the message needs them, else [R, D]."""
    drafts_SK: Tensor | None = None
    """int32; what the drafter proposes next, ``None`` if it does not."""


class BegunStep(NamedTuple):
    """A step whose forward pass was computed."""

    step: StepTensors
    shape: StepShape
    message: Step | None
    x_TD: Tensor
    """The last layer's output."""
    picked_R: Tensor | None
    """The rows of it that are sampled; ``None``: all."""


class StepProgram:
    """The computation of a step on its device, which never synchronises with the host."""

    def __init__(
        self,
        model: CausalLM,
        forward: Forward,
        state: SamplingState,
        adapter_rows: AdapterRows | None = None,
        drafter: Drafter | None = None,
        verify: Verify | None = None,
        logits: Logits | None = None,
        embeddings: EmbeddingPool | None = None,
        routes: RoutedExperts | None = None,
    ) -> None:
        """``logits``: a faster equivalent of ``model.logits``. ``embeddings``: the pool of those of images."""
        self.model = model
        self._logits = logits or model.logits
        self.state = state
        self._forward = forward
        self._adapter_rows = adapter_rows
        self._embeddings = None if embeddings is None else embeddings.table
        self._placeholders: Tensor | None = None
        """Tokens that are never sampled: a prompt has them in place of images."""
        if embeddings is not None and (ids := state.vocabulary.own_ids(embeddings.placeholders)):
            self._placeholders = torch.tensor(ids, device=embeddings.table.device)
        self._verify = verify
        self._routes = routes
        self._draft = None if drafter is None else Drafting(model, drafter, state, verify is not None)

    def __call__(self, step: StepTensors, shape: StepShape, message: Step | None = None) -> DeviceResults:
        """Compute a step of this shape. Without a ``message``, reports have the maximum width and the step depends on
        its tensors alone, so that it can be captured in a graph."""
        return self.finish(self.begin(step, shape, message))

    def begin(self, step: StepTensors, shape: StepShape, message: Step | None = None) -> BegunStep:
        """Compute the forward pass of a step."""
        rows = step.rows
        draft = self._draft if shape.has_drafter else None
        indices_R = None if shape.is_verification else step.logits_indices_R
        if indices_R is None and shape.max_query_len > 1 and not shape.is_verification:
            indices_R = (rows.cu_seqlens_q[1:] - 1).clamp(min=0)
        # Adapter numbers cover all rows of a step, so with adapters the last layer keeps all rows.
        keeps_all = step.adapters_T is not None or (message is not None and message.needs_all_rows)
        keeps_all = keeps_all or self._routes is not None or (draft is not None and draft.needs_output)
        if indices_R is not None and not keeps_all:
            rows = replace(rows, logits_indices_R=indices_R)
        if step.embedding_slots_T is not None and self._embeddings is not None:
            spans = () if message is None else tuple(Span(*msgspec.structs.astuple(span)) for span in message.spans)
            rows = replace(rows, images=ImageRows(step.embedding_slots_T, self._embeddings, spans))
        if message is not None and message.marks:
            rows = replace(rows, state_marks_T=_marks(message.marks, step.token_ids_T))
        with self._adapted(step), self._routed(step, message):
            x_TD = self._forward(step.token_ids_T, step.positions_T, rows)
        picked_R = None if indices_R is rows.logits_indices_R else indices_R
        return BegunStep(step, shape, message, x_TD, picked_R)

    def finish(self, begun: BegunStep) -> DeviceResults:
        """Sample what the forward pass has computed."""
        step, shape, message, x_TD, picked_R = begun
        extras, vocabulary = step.extras, self.state.vocabulary
        draft = self._draft if shape.has_drafter else None
        if extras is not None:  # not sooner: stages begin later steps of the same sequences before they finish this one
            self.state.remember(step, extras)
        if message is not None and not message.is_sampled and draft is None:
            return DeviceResults(None, None, None, x_TD)
        x_RD = x_TD if picked_R is None else x_TD[picked_R]
        logits_RV = self._logits(x_RD)
        adjusted_RV = logits_RV
        if extras is not None:
            adjusted_RV = self.state.adjust(logits_RV, step, extras, () if message is None else message.masks)
        if self._placeholders is not None:
            adjusted_RV = adjusted_RV.clone() if adjusted_RV is logits_RV else adjusted_RV
            adjusted_RV.index_fill_(1, self._placeholders, torch.finfo(adjusted_RV.dtype).min)
        num_accepted_S = None
        if self._verify is not None and shape.num_drafts:
            assert step.logits_indices_R is not None
            assert step.cu_samples is not None
            drafts_R = ops.drafts_behind(step.token_ids_T, step.logits_indices_R, step.cu_samples)
            tokens_R = self._verify(vocabulary.whole(adjusted_RV), step.params, drafts_R)
        else:
            tokens_R = vocabulary.sample(adjusted_RV, step.params)
        if step.logits_indices_R is not None and step.cu_samples is not None:
            num_accepted_S = ops.accept_drafts(tokens_R, step.token_ids_T, step.logits_indices_R, step.cu_samples)
        reports_RW = self._reports(logits_RV, adjusted_RV, tokens_R, step, message)
        drafts_SK = None if draft is None else draft(step, shape, tokens_R, num_accepted_S, x_TD)
        return DeviceResults(tokens_R, num_accepted_S, reports_RW, x_TD, drafts_SK)

    def _reports(
        self, logits_RV: Tensor, adjusted_RV: Tensor, tokens_R: Tensor, step: StepTensors, message: Step | None
    ) -> Tensor | None:
        num_top = self.state.most_top if message is None else message.num_top
        if step.extras is None or num_top < 0:
            return None
        asked_R = tokens_R.masked_fill(step.extras.wants_logprobs_R == 0, -1)
        return self.state.vocabulary.report_sampled(logits_RV, adjusted_RV, step.params, asked_R, num_top)

    def _routed(self, step: StepTensors, message: Step | None) -> contextlib.AbstractContextManager[None]:
        if self._routes is None:
            return contextlib.nullcontext()
        return self._routes.kept(step.slots_GT[0], () if message is None else message.routes)

    def _adapted(self, step: StepTensors) -> contextlib.AbstractContextManager[None]:
        if step.adapters_T is None:
            return contextlib.nullcontext()
        assert self._adapter_rows is not None, "the model was loaded without adapters"
        return self._adapter_rows.of_rows(step.adapters_T)


def _marks(slots: dict[int, int], token_ids_T: Tensor) -> Tensor:
    """``StateRows.marks_T``, given the slots of some rows."""
    marks_T = torch.full_like(token_ids_T, -1, dtype=torch.int32)
    marks_T[list(slots)] = torch.tensor(list(slots.values()), dtype=torch.int32, device=token_ids_T.device)
    return marks_T


class RowReader:
    """Reads a step's results to the host: tokens, accepted drafts, log-probabilities and pooled vectors."""

    def __init__(self, model: CausalLM, pooler: ChunkPooler, vocabulary: ShardedVocabulary = WHOLE) -> None:
        self._model = model
        self._pooler = pooler
        self._vocabulary = vocabulary

    def result(self, message: Step, computed: DeviceResults) -> StepResult:
        """The step's result; waits for the device."""
        num_samples = message.num_samples
        tokens: list[int] = [] if computed.tokens_R is None else computed.tokens_R[:num_samples].tolist()
        accepted = [] if computed.num_accepted_S is None else computed.num_accepted_S[: message.num_seqs].tolist()
        reports = b"" if computed.reports_RW is None else as_bytes(computed.reports_RW[:num_samples])
        x_TD = computed.x_TD
        prompts = [self._prompt_reports(prompt, x_TD[prompt.first_row :]) for prompt in message.prompts]
        values = [
            self._pooler.take(rows, x_TD[rows.first_row : rows.first_row + rows.num_rows]) for rows in message.pooled
        ]
        drafts: list[list[int]] = []
        if computed.drafts_SK is not None and message.masks:
            drafts = computed.drafts_SK[: message.num_seqs].tolist()
        return StepResult(tokens, accepted, reports, prompts, values, drafts)

    def _prompt_reports(self, prompt: PromptRows, x_TD: Tensor) -> bytes | None:
        """Reports of a prompt's rows, ``LOGPROB_ROWS`` at a time; ``None`` if a logit is not finite."""
        parts = []
        for first in range(0, len(prompt.tokens), LOGPROB_ROWS):
            tokens = prompt.tokens[first : first + LOGPROB_ROWS]
            logits_RV = self._model.logits(x_TD[first : first + len(tokens)])
            if not self._vocabulary.are_finite(logits_RV):
                return None
            tokens_R = torch.tensor(tokens, dtype=torch.int32, device=logits_RV.device)
            parts.append(
                as_bytes(self._vocabulary.report_prompt(logits_RV, tokens_R, prompt.num_top, prompt.temperature))
            )
        return b"".join(parts)


def as_bytes(values: Tensor) -> bytes:
    """The raw bytes of a tensor, in memory order."""
    return values.cpu().contiguous().numpy().tobytes()
