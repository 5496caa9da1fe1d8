"""The executor for CPUs: each message is executed before ``send`` returns.

Shapes: S sequences.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from octavo import ops
from octavo.errors import CANCELLATIONS, CheckpointError, RanksLost, RunnerError, WorkerLost
from octavo.layers.attention import rank_rows
from octavo.models.in_place import checksums
from octavo.models.model_adapters import ModelAdapters
from octavo.models.pooling import Pooling
from octavo.models.registry import CausalLM
from octavo.models.weight_updates import WeightUpdates
from octavo.ops.attention.attention import PagedRows
from octavo.ops.device_backend import backend_of
from octavo.ops.dispatch import REFERENCE
from octavo.plugins import CPU
from octavo.runtime.drafting.drafter import Drafter
from octavo.runtime.drafting.optional_acceptance import Verify
from octavo.runtime.executors.block_copies import HostBlockCopies
from octavo.runtime.executors.embedding_pool import EmbeddingPool
from octavo.runtime.executors.expert_moves import ExpertMoves
from octavo.runtime.executors.pooler import ChunkPooler, Pooler
from octavo.runtime.executors.routed_experts import RoutedExperts
from octavo.runtime.executors.sampling_state import SamplingState
from octavo.runtime.executors.step_program import BegunStep, Forward, Logits, RowReader, StepProgram
from octavo.runtime.executors.step_views import StepBuffers, batch_indices
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.ranks.stage_link import StageLink
from octavo.runtime.replies import Done, FailedReply
from octavo.runtime.sharded_logits import WHOLE, ShardedVocabulary
from octavo.steps.limits import StepLimits
from octavo.steps.messages import (
    CacheCopy,
    Compile,
    EncodeImages,
    LoadAdapter,
    LoadWeights,
    Message,
    MoveExperts,
    ReadChecksums,
    ReadExperts,
    Reply,
    Step,
    StepResult,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)

LAST_TOKEN = Pooler(Pooling("last"), None)


class HostExecutor:
    """Runs a model over a paged KV cache in host memory."""

    runs_ahead = False

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        vocab_size: int,
        limits: StepLimits,
        forward: Forward | None = None,
        pooler: Pooler = LAST_TOKEN,
        adapters: ModelAdapters | None = None,
        vocabulary: ShardedVocabulary = WHOLE,
        drafter: Drafter | None = None,
        verify: Verify | None = None,
        logits: Logits | None = None,
        embeddings: EmbeddingPool | None = None,
        updates: WeightUpdates | None = None,
        experts: ExpertMoves | None = None,
        link: StageLink | None = None,
    ) -> None:
        """``forward`` may be a faster equivalent of ``model.forward`` over the storage's layers, used for steps without
        adapters, and ``logits`` one of ``model.logits``. ``embeddings``: those of images, if the model takes any.
        ``link``: to the ranks of other stages, if there are any."""
        device = storage.device
        max_len = limits.max_blocks * storage.block_size
        self._state = SamplingState(
            limits.max_num_seqs,
            max_len,
            limits.largest().num_samples,
            vocab_size,
            device,
            limits.num_drafts,
            vocabulary,
        )
        self.adapters = adapters
        self._updates = updates
        self._experts = experts
        self._forward, self._link = forward, link
        self._model, self._layers, self._context = model, storage.layers, storage.context
        self._embeddings = embeddings
        rows = None if adapters is None else adapters.rows
        routes = RoutedExperts.of(model, storage)
        self._program = StepProgram(
            model, self._compute, self._state, rows, drafter, verify, logits, embeddings, routes
        )
        self._reader = RowReader(model, ChunkPooler(model, pooler), vocabulary)
        self._copies = HostBlockCopies(storage)
        self._pending: deque[StageReply] = deque()
        """Steps that this stage has computed, and the last one not yet."""
        num_steps = 1 if link is None else link.stage.count
        self._buffers = deque(StepBuffers(storage.num_groups) for _ in range(num_steps))
        """For each step in flight, that of the next one first."""
        self._num_groups, self._block_size = storage.num_groups, storage.block_size
        self._sequences, self._num_blocks = storage.sequences, storage.num_blocks

    def send(self, message: Message) -> Reply[Any]:
        """See ``Executor``."""
        match message:
            case Step():
                return self._step(message)
            case EncodeImages():
                assert self._embeddings is not None, "the model takes no images"
                return self._embeddings.execute(message)
            case _ if isinstance(message, CacheCopy):
                return self._copies.execute(message)
            case LoadAdapter() | UnloadAdapter():
                return change_adapters(self.adapters, message)
            case LoadWeights():
                with torch.inference_mode():
                    return load_weights(self._updates, message)
            case ReadChecksums():
                return read_checksums(self._model)
            case ReadExperts() | MoveExperts():
                assert self._experts is not None, "no experts are moved"
                return self._experts.execute(message)
            case Compile():
                if ops.adjust_logits.chosen(CPU, torch.float32) != REFERENCE:
                    backend_of(CPU).compile_rare()
        return Done(None)

    def _step(self, message: Step) -> Reply[StepResult]:
        if self._link is not None:
            with _ending_ranks(message), torch.inference_mode():
                return self._begin_stage(message, self._link)
        try:
            with torch.inference_mode():
                return Done(self._finish(message, self._begin(message)))
        except (WorkerLost, RanksLost, *CANCELLATIONS):
            raise  # with all blocks: there is nothing to go on with
        except BaseException as error:
            logger.exception("a forward pass of %d sequences failed", message.num_seqs)
            self._state.forget_results(batch_indices(message, self._num_groups))
            return FailedReply(RunnerError(f"the forward pass failed: {type(error).__name__}: {error}"))

    def _begin(self, message: Step) -> BegunStep:
        step, token_ids_T = self._buffers[0].filled(message)
        needs_tokens = bool(message.num_seqs) and token_ids_T.min() < 0
        if needs_tokens or message.histories or message.lists:
            self.finish_pending()
        self._state.update(message.histories, message.lists)
        if needs_tokens:
            self._state.stage(step, self._block_size)
        return self._program.begin(step, message.shape, message)

    def _begin_stage(self, message: Step, link: StageLink) -> Reply[StepResult]:
        """Compute this stage. The step is finished at once on the last stage, and where it may not wait."""
        while len(self._pending) >= link.stage.count:
            self.finish_first()
        num_rows = message.shape.num_rows if message.needs_all_rows else message.shape.num_samples
        may_wait = link.may_wait(num_rows)
        if not may_wait:
            self.finish_pending()
        reply = StageReply(self, message, self._begin(message))
        self._pending.append(reply)
        self._buffers.rotate(-1)
        if link.stage.is_last or not may_wait:
            self.finish_pending()
        return reply

    def finish_first(self) -> None:
        """Finish the oldest of the steps that were begun."""
        self._pending.popleft().finish()

    def finish_pending(self) -> None:
        """Finish the steps that were begun."""
        while self._pending:
            self.finish_first()

    def finish_stage(self, message: Step, begun: BegunStep) -> StepResult:
        """Finish the oldest step that was begun. Raises ``RanksLost`` if that fails."""
        assert self._link is not None
        with _ending_ranks(message), torch.inference_mode():
            return self._finish(message, begun._replace(x_TD=self._link.finish(begun.x_TD)))

    def _finish(self, message: Step, begun: BegunStep) -> StepResult:
        computed = self._program.finish(begun)
        if computed.tokens_R is not None:
            self._state.keep(begun.step, computed.tokens_R, computed.num_accepted_S)
        return self._reader.result(message, computed)

    def _compute(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows) -> Tensor:
        if self._context is not None:
            rows = rows.owned(self._context.part)
        if self._sequences is not None:
            rows = rank_rows(rows, self._sequences, self._num_blocks, self._block_size)
        if self._link is not None:
            assert self._forward is not None, "stages need one that takes what the stage before has computed"
            return self._link.begin(self._forward, token_ids_T, positions_T, rows)
        has_adapters = self.adapters is not None and bool(self.adapters.rows.by_number)
        if self._forward is not None and not has_adapters:
            return self._forward(token_ids_T, positions_T, rows)
        return self._model.forward(token_ids_T, positions_T, self._layers, rows)


@contextlib.contextmanager
def _ending_ranks(message: Step) -> Iterator[None]:
    """What fails in this block ends the ranks, as other stages wait for its output, or go on from it. Raises
    ``RanksLost``."""
    try:
        yield
    except (WorkerLost, RanksLost, *CANCELLATIONS):
        raise
    except BaseException as error:
        logger.exception("a step of %d sequences failed", message.num_seqs)
        raise RanksLost(f"a step failed: {type(error).__name__}: {error}") from error


class StageReply:
    """The reply to a step of which this stage is computed."""

    def __init__(self, executor: HostExecutor, message: Step, begun: BegunStep) -> None:
        self._executor = executor
        self._begun: tuple[Step, BegunStep] | None = (message, begun)
        self._result: StepResult | None = None

    def finish(self) -> None:
        """Wait for the last stage; of steps that were begun earlier, the executor has done so."""
        assert self._begun is not None, "it is finished"
        self._result, self._begun = self._executor.finish_stage(*self._begun), None

    def wait(self) -> StepResult:
        """See ``Reply``."""
        while self._result is None:
            self._executor.finish_first()
        return self._result


def change_adapters(adapters: ModelAdapters | None, message: LoadAdapter | UnloadAdapter) -> Reply[None]:
    """Load or unload an adapter; the reply raises ``CheckpointError`` if that fails."""
    try:
        if adapters is None:
            raise CheckpointError("this engine does not accept adapters; set enable_lora")
        if isinstance(message, LoadAdapter):
            adapters.load(message.number, message.path)
        else:
            adapters.unload(message.number)
    except CheckpointError as error:
        return FailedReply(error)
    return Done(None)


def read_checksums(model: CausalLM) -> Reply[bytes]:
    """See ``ReadChecksums``."""
    return Done(msgspec.json.encode(checksums(model), order="sorted") + b"\n")


def load_weights(updates: WeightUpdates | None, message: LoadWeights) -> Reply[None]:
    """Write over the model's weights; the reply raises ``CheckpointError`` if nothing was changed."""
    try:
        if updates is None:
            raise CheckpointError(
                "the weights of this model cannot be changed while it is loaded, nor any with enable_eplb"
            )
        updates.load(message)
    except CheckpointError as error:
        return FailedReply(error)
    return Done(None)
