"""Carries out plans with a model: the forward pass, then sampling.

Shapes: T tokens of the step, R rows whose logits are wanted, D model, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import RunnerError
from octavo.layers.lora import AdapterRows
from octavo.models.pooling import Pooling
from octavo.models.registry import CausalLM
from octavo.runtime.forward_batch import BatchBuilder, ForwardBatch
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.pooled import ChunkPooler
from octavo.runtime.sampler import NOT_NUMBERS, Choice, Row, Sampler, are_finite, token_logprobs
from octavo.sampling_params import SamplingParams
from octavo.types import GroupBlocks, Masks, Plan, Request, Sampled, Scheduled, Sequence

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], Tensor]
"""The last layer's output [T, D] of a batch, good until the next call."""

LAST_TOKEN = Pooling("last")
LOGPROB_ROWS = 128
"""Prompt positions whose logits are in memory at once."""
WARM_UP_TOKENS = 16
"""More rows than any kernel takes for a single token, few enough to cost nothing."""


class Computer(Protocol):
    """A runner that does all of a step at once."""

    def compute(self, plan: Plan, masks: Masks) -> list[Sampled]:
        """The results of a plan of which no item is stale."""
        ...


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A plan that is computed when its result is asked for: a CPU has nothing to overlap it with."""

    runner: Computer
    plan: Plan

    @property
    def is_started(self) -> bool:
        return False

    def sample(self, masks: Masks) -> list[Sampled]:
        """Compute the plan; items that are stale by now give an empty ``Sampled``. Raise ``RunnerError``."""
        live = [item for item in self.plan if not item.is_stale]
        try:
            with torch.inference_mode():
                results = iter(self.runner.compute(live, masks) if live else [])
        except Exception as error:
            logger.exception("a forward pass of %d sequences failed", len(live))
            raise RunnerError(f"the forward pass failed: {type(error).__name__}: {error}") from error
        return [Sampled([]) if item.is_stale else next(results) for item in self.plan]


class ModelRunner:
    """Runs a model over the paged cache. Steps must be asked for in the order they were submitted."""

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        vocab_size: int,
        forward: Forward | None = None,
        pooling: Pooling = LAST_TOKEN,
        adapter_rows: AdapterRows | None = None,
    ) -> None:
        """``forward`` may be a faster way to do what ``model.forward`` does over the storage's layers, without any
        adapter; ``adapter_rows`` are those that the model was loaded with."""
        device = storage.device
        self._model = model
        self._layers = storage.layers
        self._forward = self._plain_forward if forward is None else forward
        self._builder = BatchBuilder(storage.block_size, device, storage.num_groups)
        self._sampler = Sampler(vocab_size, device)
        self._pooler = ChunkPooler(model, pooling)
        self._adapter_rows = adapter_rows

    def warm_up(self) -> None:
        """Compute a chunk and a single token that nobody asked for, so that no request waits for a compiler.

        They write to block 0, whose content nothing reads before it is written again. Raises ``RunnerError``.
        """
        seq = Sequence(Request(0, [0] * WARM_UP_TOKENS, SamplingParams(), max_tokens=1))
        seq.groups = [GroupBlocks([0] * WARM_UP_TOKENS) for _ in range(self._builder.num_groups)]
        last = WARM_UP_TOKENS - 1
        for start, tokens in ((0, (0,) * last), (last, (0,))):
            self.submit([Scheduled(seq, start, tokens, (), True, seq.epoch)]).sample({})

    def submit(self, plan: Plan) -> PendingStep:
        """Take a plan; the steps before it may still be without a result."""
        return PendingStep(self, plan)

    def compute(self, plan: Plan, masks: Masks) -> list[Sampled]:
        """Compute and sample a plan of which no item is stale."""
        chosen: list[int] = []
        rows: list[Row] = []
        end = 0
        for item in plan:
            end += len(item.tokens) + len(item.drafts)
            if item.samples and item.seq.request.task == "generate":
                chosen.extend(range(end - 1 - len(item.drafts), end))
                rows.extend(_rows(item, masks))
        batch = self._builder.build(plan, None if end == len(plan) or _needs_all_rows(plan) else chosen)
        x_TD = self._compute(batch, _rows_by_adapter(plan, batch))
        x_RD = x_TD[chosen] if batch.rows.logits_indices_R is None else x_TD
        choices = iter(self._sampler.sample(self._model.logits(x_RD).float(), rows) if rows else [])
        results = []
        for item, (first, end) in zip(plan, itertools.pairwise(batch.first_rows), strict=True):
            if item.seq.request.task != "generate":
                results.append(self._pooler.take(item, x_TD[first:end]))
                continue
            sampled = _accept(item, choices) if item.samples else Sampled([])
            if item.seq.request.params.prompt_logprobs is not None:
                self._add_prompt_logprobs(sampled, item, x_TD[first:])
            results.append(sampled)
        return results

    def _compute(self, batch: ForwardBatch, by_adapter: dict[str, Tensor]) -> Tensor:
        if not by_adapter:
            return self._forward(batch)
        assert self._adapter_rows is not None, "the model was loaded without adapters"
        with self._adapter_rows.of_step(by_adapter):
            return self._plain_forward(batch)

    def _plain_forward(self, batch: ForwardBatch) -> Tensor:
        return self._model.forward(batch.token_ids_T, batch.positions_T, self._layers, batch.rows)

    def _add_prompt_logprobs(self, sampled: Sampled, item: Scheduled, x_TD: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow this item's positions, some rows at a time."""
        request = item.seq.request
        count = request.params.prompt_logprobs or 0
        targets = request.prompt_tokens[item.start + 1 : item.start + 1 + len(item.tokens)]
        sampled.prompt_logprobs = []
        for first in range(0, len(targets), LOGPROB_ROWS):
            tokens = targets[first : first + LOGPROB_ROWS]
            logits_RV = self._model.logits(x_TD[first : first + len(tokens)]).float()
            if not all(are_finite(logits_RV)):
                sampled.tokens, sampled.error = [], NOT_NUMBERS
                return
            sampled.prompt_logprobs += token_logprobs(logits_RV, tokens, [count] * len(tokens))


def _needs_all_rows(plan: Plan) -> bool:
    """Whether more is looked at than the rows that tokens are sampled after. Adapters know the rows of a whole step."""
    requests = [item.seq.request for item in plan]
    return any(r.task != "generate" or r.adapter or r.params.prompt_logprobs is not None for r in requests)


def _rows_by_adapter(plan: Plan, batch: ForwardBatch) -> dict[str, Tensor]:
    """The rows that want each adapter, in order."""
    ranges: dict[str, list[Tensor]] = {}
    for item, (first, end) in zip(plan, itertools.pairwise(batch.first_rows), strict=True):
        if item.seq.request.adapter:
            ranges.setdefault(item.seq.request.adapter, []).append(torch.arange(first, end))
    return {name: torch.cat(parts).to(batch.token_ids_T.device) for name, parts in ranges.items()}


def _rows(item: Scheduled, masks: Masks) -> Iterator[Row]:
    """The token after this item, preceded by one for the place of each draft."""
    seq = item.seq
    end = item.start + len(item.tokens)
    tokens = [*seq.tokens[:end], *item.drafts] if item.drafts else seq.tokens
    seq_masks = masks.get(seq.id)
    for i in range(1 + len(item.drafts)):
        yield Row(
            params=seq.request.params,
            seed=seq.request.seed,
            position=end + i,
            tokens=tokens,
            num_prompt_tokens=seq.num_prompt_tokens,
            stop_token_ids=seq.stop_token_ids,
            mask=None if seq_masks is None else seq_masks[i],
            banned_sequences=seq.request.banned_sequences,
        )


def _accept(item: Scheduled, choices: Iterator[Choice]) -> Sampled:
    """Drafts are kept as long as they are what was chosen in their place: the same tokens as without drafts."""
    made = [next(choices) for _ in range(1 + len(item.drafts))]
    num_kept = 1
    while num_kept <= len(item.drafts) and made[num_kept - 1][::2] == (item.drafts[num_kept - 1], None):
        num_kept += 1
    kept = made[:num_kept]
    error = next((choice.error for choice in kept if choice.error is not None), None)
    if error is not None:
        return Sampled([], error=error)
    logprobs = [choice.logprobs for choice in kept if choice.logprobs is not None]
    return Sampled([choice.token for choice in kept], logprobs or None)
