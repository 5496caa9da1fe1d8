"""Runners around small models, on the CPU: of the executor for CPUs, and of the one for devices without graphs."""

from __future__ import annotations

from typing import Any

import torch

from octavo.engine.runner.graph_dispatcher import GraphDispatcher
from octavo.engine.runner.persistent_batch import PersistentBatch
from octavo.engine.runner.step_encoder import StepEncoder
from octavo.engine.runner.step_runner import StepRunner
from octavo.models.model_adapters import ModelAdapters
from octavo.runtime.executors.host_executor import HostExecutor
from octavo.runtime.executors.step_program import Forward
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.runtime.kv_storage import KVStorage
from octavo.steps.graph_shapes import ChooseShape, GraphLimits, exact_shape
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Executor

CPU = torch.device("cpu")


def make_runner(
    executor: Executor,
    storage: KVStorage,
    vocab_size: int,
    limits: StepLimits,
    choose_shape: ChooseShape,
    numbers: dict[str, int] | None = None,
    has_stages: bool = False,
    **settings: Any,
) -> StepRunner:
    batch = PersistentBatch(limits.max_num_seqs, limits.max_blocks, storage.num_groups)
    encoder = StepEncoder(batch, storage.block_size, vocab_size, choose_shape, numbers, **settings)
    return StepRunner(executor, encoder, has_stages)


def host_runner(
    model: Any, storage: KVStorage, vocab_size: int, limits: StepLimits, forward: Forward | None = None, **parts: Any
) -> StepRunner:
    """Computes a step when its result is asked for."""
    executor = HostExecutor(model, storage, vocab_size, limits, forward, **parts)
    return make_runner(executor, storage, vocab_size, limits, exact_shape, has_drafter=limits.num_drafts > 0)


def stream_runner(
    model: Any,
    storage: KVStorage,
    vocab_size: int,
    limits: StepLimits,
    adapters: ModelAdapters | None = None,
    numbers: dict[str, int] | None = None,
    batch_invariant: bool = False,
    **parts: Any,
) -> StepRunner:
    """Computes a step as soon as it is submitted, with the padding of graphs."""
    executor = StreamExecutor(model, storage, vocab_size, limits, batch_invariant, adapters=adapters, **parts)
    sizes = limits.max_num_seqs, limits.max_num_batched_tokens
    of_graphs = GraphLimits(*sizes, numbers is not None, limits.max_drafts, limits.num_drafts > 0)
    graphs = GraphDispatcher(of_graphs, uses_graphs=False)
    return make_runner(
        executor,
        storage,
        vocab_size,
        limits,
        graphs.choose,
        numbers,
        always_uses_lora=batch_invariant and numbers is not None,
        has_drafter=limits.num_drafts > 0,
    )
