"""Builds what decides around an executor: the encoder of steps, their padded shapes, the warm-up, and grammars."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from octavo.config import FULL, ModelSettings
from octavo.engine.runner.graph_dispatcher import GraphDispatcher
from octavo.engine.runner.kernel_tuning import NO_TUNING, TuningPlan, plan_of
from octavo.engine.runner.persistent_batch import PersistentBatch
from octavo.engine.runner.step_encoder import StepEncoder
from octavo.engine.runner.step_runner import StepRunner, compute_padding
from octavo.engine.sequence_images import ImageSettings
from octavo.grammar.masks import MatcherMasks
from octavo.grammar.matchers import GrammarError
from octavo.grammar.vocabulary import Vocabulary
from octavo.ops.device_backend import is_gpu
from octavo.runtime.kv_storage import KVStorage
from octavo.steps.graph_shapes import GraphLimits, exact_shape
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Executor
from octavo.system.background_threads import ThreadGroup
from octavo.text.tokenizer import load_tokenizer


def make_grammars(
    settings: ModelSettings, path: Path, eos_token_ids: tuple[int, ...], is_expected: bool = False
) -> MatcherMasks:
    """Structured output for the model in the folder ``path``; its tokenizer is loaded when it is first needed, or from
    now on if grammars are expected."""

    def vocabulary() -> Vocabulary:
        tokenizer = load_tokenizer(Path(settings.tokenizer or path))
        if tokenizer is None:
            raise GrammarError("cannot be used: the model has no tokenizer")
        return tokenizer.vocabulary(eos_token_ids)

    masks = MatcherMasks(vocabulary)
    if is_expected:
        masks.start_loading()
    return masks


def make_runner(
    settings: ModelSettings,
    executor: Executor,
    storage: KVStorage,
    vocab_size: int,
    most: StepLimits,
    adapters: dict[str, int] | None = None,
    tuning: TuningPlan | None = None,
    images: ImageSettings | None = None,
    threads: ThreadGroup | None = None,
) -> tuple[StepRunner, Callable[[], None]]:
    """The runner of an executor, and its warm-up. ``adapters`` is shared with ``LoadedAdapters``, which fills it.

    ``tuning`` replaces the settings of kernel tuning, which a GPU alone has.
    """
    batch = PersistentBatch(most.max_num_seqs, most.max_blocks, storage.num_groups)
    has_drafter = most.num_drafts > 0
    encoder = StepEncoder(
        batch,
        storage.block_size,
        vocab_size,
        exact_shape,
        adapters,
        always_uses_lora=settings.batch_invariant,
        has_drafter=has_drafter,
        images=images,
        has_rope_sets=most.has_rope_sets,
        dense_context=most.dense_context if executor.runs_ahead and not settings.batch_invariant else 0,
        route_bytes=0 if storage.routes_NC is None else 2 * storage.routes_NC.shape[1],
    )
    runner = StepRunner(executor, encoder, settings.pipeline_parallel_size > 1, threads)
    if not executor.runs_ahead:
        return runner, partial(compute_padding, runner)
    has_graphs = not settings.enforce_eager
    limits = GraphLimits(
        most.max_num_seqs,
        most.max_num_batched_tokens,
        adapters is not None,
        most.max_drafts,
        has_drafter,
        longest_context=0 if settings.batch_invariant else encoder.max_len,
        dense_context=encoder.dense_context,
    )
    graphs = GraphDispatcher(limits, has_graphs)
    encoder.choose_shape = graphs.choose
    runner.on_wake = graphs.capture_again
    if tuning is None:
        tuning = plan_of(settings) if is_gpu(storage.device) else NO_TUNING
    return runner, partial(graphs.warm_up, runner, tuning, settings.warmup == FULL)
