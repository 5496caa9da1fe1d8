"""Builds the half of the device's loop that decides: the encoder of steps, their padded shapes and the warm-up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from octavo.config import ModelSettings
from octavo.engine.graph_choice import GraphChoice
from octavo.engine.kernel_tuning import NO_TUNING, TuningPlan, plan_of
from octavo.engine.persistent_batch import PersistentBatch
from octavo.engine.step_encoder import StepEncoder
from octavo.engine.step_runner import StepRunner, compute_padding
from octavo.runtime.kv_storage import KVStorage
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Executor
from octavo.steps.shapes import exact_shape


def make_runner(
    settings: ModelSettings,
    executor: Executor,
    storage: KVStorage,
    vocab_size: int,
    most: StepLimits,
    adapters: dict[str, int] | None = None,
    tuning: TuningPlan | None = None,
) -> tuple[StepRunner, Callable[[], None]]:
    """The runner of an executor, and its warm-up. ``adapters`` is shared with ``LoadedAdapters``, which fills it.

    ``tuning`` replaces the settings of kernel tuning, which a GPU alone has.
    """
    batch = PersistentBatch(most.max_num_seqs, most.max_blocks, storage.num_groups)
    has_drafter = most.num_drafts > 0
    encoder = StepEncoder(
        batch, storage.block_size, vocab_size, exact_shape, adapters, settings.batch_invariant, has_drafter
    )
    runner = StepRunner(executor, encoder)
    if not executor.runs_ahead:
        return runner, partial(compute_padding, runner)
    has_graphs = not settings.enforce_eager
    graphs = GraphChoice(
        most.max_num_seqs,
        most.max_num_batched_tokens,
        adapters is not None,
        has_graphs,
        most.max_drafts,
        has_drafter,
    )
    encoder.choose_shape = graphs.choose
    if tuning is None:
        tuning = plan_of(settings) if storage.device.type == "cuda" else NO_TUNING
    return runner, partial(graphs.warm_up, runner, tuning)
