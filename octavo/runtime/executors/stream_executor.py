"""The executor for CUDA devices: steps are started in the order they are sent, and ``send`` returns without waiting.

A plain step is uploaded as one packed buffer and runs as one CUDA graph, or kernel by kernel when the step is long
enough to keep the device busy. Each sequence's token stays on the device for the next step and is copied to the host.
If a message needs more than tokens (``Step.is_plain`` is false), the host reads the results before ``send`` returns.

Shapes: S sequences, R sampled rows, N numbers of a result, W int32 words of a report.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import CANCELLATIONS, RunnerError
from octavo.layers.stacked_lora import StackedRows
from octavo.models.model_adapters import ModelAdapters
from octavo.models.registry import CausalLM
from octavo.models.weight_updates import WeightUpdates
from octavo.ops.device_backend import backend_of, is_gpu
from octavo.ops.device_captures import wait_for_device
from octavo.runtime.drafting.drafter import Drafter
from octavo.runtime.drafting.optional_acceptance import Verify
from octavo.runtime.executors.block_copies import DeviceBlockCopies, HostBlockCopies
from octavo.runtime.executors.device_program import DeviceProgram, KernelTuner, with_distinct_layers
from octavo.runtime.executors.embedding_pool import EmbeddingPool
from octavo.runtime.executors.expert_moves import ExpertMoves
from octavo.runtime.executors.graphs import Graphs
from octavo.runtime.executors.host_executor import LAST_TOKEN, change_adapters, load_weights, read_checksums
from octavo.runtime.executors.pooler import ChunkPooler, Pooler
from octavo.runtime.executors.step_program import RowReader
from octavo.runtime.executors.step_views import batch_indices
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.replies import Done, FailedReply
from octavo.runtime.sharded_logits import WHOLE, ShardedVocabulary
from octavo.runtime.sleeping_memory import SleepingMemory
from octavo.steps.limits import StepLimits
from octavo.steps.messages import (
    CacheCopy,
    Compile,
    EncodeImages,
    LoadAdapter,
    LoadWeights,
    MeasureKernels,
    Message,
    MoveExperts,
    PrepareTuning,
    ReadChecksums,
    ReadExperts,
    Reply,
    Sleep,
    Step,
    StepResult,
    Tuning,
    UnloadAdapter,
    UseKernels,
    Wake,
)
from octavo.system.background_threads import ThreadGroup, current_group, stop_if_ending

SECONDS_BETWEEN_LOOKS = 0.05
"""Of a thread that waits, whether what it works for has ended."""

logger = logging.getLogger(__name__)


class StreamResults:
    """The reply of a step that is running on the device."""

    def __init__(
        self,
        message: Step,
        result_N: npt.NDArray[np.int32],
        reports_RW: npt.NDArray[np.int32] | None,
        done: torch.cuda.Event | None,
    ) -> None:
        """Host buffers that are complete once ``done`` is."""
        most, num_seqs = message.shape.num_samples, message.num_seqs
        self._tokens_R = result_N[: message.num_samples]
        self._accepted_S = result_N[most : most + num_seqs] if message.shape.num_drafts else None
        self._reports_RW, self._done = reports_RW, done

    def wait(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()  # raises when the device is lost, which is fatal
        accepted = [] if self._accepted_S is None else self._accepted_S.tolist()
        reports = b"" if self._reports_RW is None else self._reports_RW.tobytes()
        return StepResult(self._tokens_R.tolist(), accepted, reports)


_executors: WeakSet[StreamExecutor] = WeakSet()
"""Of this process."""


class StreamExecutor:
    """Runs a model on a device that executes kernels asynchronously."""

    runs_ahead = True

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        vocab_size: int,
        limits: StepLimits,
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        pooler: Pooler = LAST_TOKEN,
        adapters: ModelAdapters | None = None,
        vocabulary: ShardedVocabulary = WHOLE,
        drafter: Drafter | None = None,
        verify: Verify | None = None,
        embeddings: EmbeddingPool | None = None,
        updates: WeightUpdates | None = None,
        experts: ExpertMoves | None = None,
    ) -> None:
        device = storage.device
        rows = None if adapters is None else adapters.rows
        assert rows is None or isinstance(rows, StackedRows), "adapters on a CUDA device need StackedRows"
        self._model, self._layers = model, storage.layers
        self._embeddings = embeddings
        self._parts = storage, vocab_size, limits, rows, vocabulary, drafter, verify, embeddings
        self._batch_invariant = batch_invariant
        self._adapters, self._updates, self._experts = adapters, updates, experts
        self._program = DeviceProgram(model, *self._parts)
        self._tuner: KernelTuner | None = None
        self._reader = RowReader(model, ChunkPooler(model, pooler), vocabulary)
        self._is_gpu = is_gpu(device)
        self._backend = backend_of(device.type)
        self._stream = torch.cuda.Stream(device) if self._is_gpu else None  # type: ignore[no-untyped-call]
        has_graphs = self._is_gpu and not enforce_eager
        self._graphs = Graphs(self._program, self._backend.launched_early) if has_graphs else None
        if has_graphs and embeddings is not None:
            embeddings.use_graphs()
        self._copies = HostBlockCopies(storage) if self._stream is None else DeviceBlockCopies(storage, self._stream)
        self._compiling = list[Compiling]()
        """What is not compiled yet: a rank may be asked for more before it has ended."""
        self._pool = storage.tensors
        self._memory = SleepingMemory(device)
        self._device = self._program.device
        self._shares_device = self._is_gpu and any(other._device == self._device for other in _executors)
        """Whether this process had another executor on the device when this one was made."""
        _executors.add(self)

    def send(self, message: Message) -> Reply[Any]:
        """See ``Executor``."""
        match message:
            case Step():
                return self._step(message)
            case EncodeImages():
                assert self._embeddings is not None, "the model takes no images"
                with self._on_stream():
                    return self._embeddings.execute(message)
            case _ if isinstance(message, CacheCopy):
                return self._copies.execute(message)
            case LoadAdapter() | UnloadAdapter():
                return change_adapters(self._adapters, message)
            case LoadWeights():
                with self._on_stream():  # behind the steps that were started
                    return load_weights(self._updates, message)
            case ReadChecksums():
                with self._on_stream():  # behind weights that are written over
                    return read_checksums(self._model)
            case ReadExperts() | MoveExperts():
                assert self._experts is not None, "no experts are moved"
                with self._on_stream():  # behind the steps that were started
                    return self._experts.execute(message)
            case Compile():
                compiling = Compiling(partial(self._compile, message))
                self._compiling = [each for each in self._compiling if not each.is_over] + [compiling]
                return compiling
            case PrepareTuning() | MeasureKernels() | UseKernels():
                return Done(self._tune(message))
            case Sleep():
                return self._sleep()
            case Wake(parts=parts):
                with torch.inference_mode():
                    self._memory.restore(parts)
                if not self._memory.is_freed:
                    self._go_on_compiling()
        return Done(None)

    # ---- steps

    def _step(self, message: Step) -> Reply[StepResult]:
        try:
            with self._on_stream():
                self._program.upload(message)
                self._program.num_steps += 1
                return self._start(message) if message.is_plain else self._run(message)
        except CANCELLATIONS:
            raise
        except BaseException as error:
            if message.is_plain and not isinstance(error, torch.OutOfMemoryError):
                raise  # the device may be lost, which is fatal
            logger.exception("a forward pass of %d sequences failed", message.num_seqs)
            with self._on_stream():
                self._program.start_again()
                self._program.state.forget_results(batch_indices(message, self._program.num_groups))
            return FailedReply(RunnerError(f"the forward pass failed: {type(error).__name__}: {error}"))

    def _start(self, message: Step) -> Reply[StepResult]:
        """Start a plain step, whose arrays say everything, without waiting for it."""
        index = self._program.num_steps - 1
        if message.uses_graph and self._graphs is not None:
            self._graphs(message.shape)
        else:
            with self._as_in_graphs():
                self._program(message.shape)
        reports_RW = None if message.num_top < 0 else self._program.send_reports(index, message.num_samples)
        done = None
        if self._is_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return StreamResults(message, self._program.result(index), reports_RW, done)

    def _run(self, message: Step) -> Reply[StepResult]:
        """Compute a step that needs more than tokens, and wait for it."""
        with self._as_in_graphs():
            step, computed = self._program.compute(message.shape, message)
            result = self._reader.result(message, computed)
            self._program.publish(step, computed)
        return Done(result)

    # ---- compiling

    def _compile(self, message: Compile) -> None:
        """Compile kernels on a separate stream, over buffers that no step uses."""
        compiled_only = self._backend.compiled_only(message.num_threads or None) if self._is_gpu else None
        if compiled_only is None:
            return
        with torch.cuda.stream(torch.cuda.Stream()), self._around():  # type: ignore[no-untyped-call]
            program = DeviceProgram(with_distinct_layers(self._model, self._layers), *self._parts)
            with compiled_only, self._as_in_graphs():
                for shape in message.shapes:
                    stop_if_ending()
                    program(shape)

    # ---- sleep

    def _sleep(self) -> Reply[None]:
        """Free what can be freed. Kernels are compiled over the weights: that ends soon, and goes on after waking."""
        for compiling in self._compiling:
            compiling.interrupt()
        if self._is_gpu:
            wait_for_device()
        self._tuner = None
        if self._graphs is not None:
            self._graphs.clear()
        if self._embeddings is not None:
            self._embeddings.forget_graphs()
        try:
            with torch.inference_mode():
                self._memory.free(self, self._pool)
        except RunnerError as error:
            self._go_on_compiling()
            return FailedReply(error)
        return Done(None)

    def _go_on_compiling(self) -> None:
        for compiling in self._compiling:
            compiling.resume()

    # ---- tuning

    def _tune(self, message: Tuning) -> Any:
        with self._on_stream():
            if self._tuner is None:
                self._tuner = KernelTuner(DeviceProgram(self._model, *self._parts))
            return self._tuner.execute(message)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream), self._around():  # a stream of ``None`` changes nothing
            yield

    def _as_in_graphs(self) -> contextlib.AbstractContextManager[None]:
        """Launch kernels with the options that graphs use, so that none is compiled twice."""
        return self._backend.launched_early() if self._graphs is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with contextlib.ExitStack() as settings:
            settings.enter_context(torch.inference_mode())
            if self._batch_invariant:
                settings.enter_context(self._backend.batch_invariant())
            if self._shares_device:
                settings.enter_context(self._backend.without_grid_barriers())
            yield


class Compiling:
    """The reply of work that runs in a background thread, which ends with the engine that asked for it.

    It can be interrupted, and then begins again: what was compiled is found.
    """

    def __init__(self, work: partial[None]) -> None:
        self._work, self._group = work, current_group()
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.resume()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def resume(self) -> None:
        """Begin again what was interrupted."""
        if not self.is_over:
            self._piece = ThreadGroup(self._group)
            self._thread = self._piece.start("compile", self._run, self._piece)

    def interrupt(self) -> None:
        """End at the next kernel; ``wait`` then waits for what ``resume`` begins."""
        self._piece.stop()
        self._thread.join()

    def _run(self, piece: ThreadGroup) -> None:
        try:
            self._work()
        except BaseException as error:  # re-raised by ``wait``
            if piece.is_ending and not self._group.is_ending:
                return
            self._error = error
        self._over.set()

    def wait(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_LOOKS):
            stop_if_ending()
        if self._error is not None:
            raise self._error
