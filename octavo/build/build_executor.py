"""Builds the executor of a model: its memory, the bounds of its steps, and the class for its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.build.build_vision import Vision
from octavo.build.device_settings import resolve_kv_dtype
from octavo.config import EngineConfig, ModelSettings
from octavo.models.layer_cache import LayerCacheSpec, own_cache, rank_cache, with_routes
from octavo.models.model_adapters import ModelAdapters
from octavo.models.model_config import ModelConfig
from octavo.models.registry import CausalLM, LoadedModel
from octavo.models.weight_updates import WeightUpdates
from octavo.ops.collective import Collective, ContextRanks
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime import memory_budget
from octavo.runtime.drafting.drafter import Drafter
from octavo.runtime.drafting.optional_acceptance import Verify
from octavo.runtime.executors.embedding_pool import EmbeddingPool
from octavo.runtime.executors.expert_moves import ExpertMoves
from octavo.runtime.executors.forward import make_forward, make_logits
from octavo.runtime.executors.host_executor import HostExecutor
from octavo.runtime.executors.pooler import Pooler
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.runtime.kv_storage import ONE_STATE, KVStorage, StatePool
from octavo.runtime.ranks.stage_link import StageLink
from octavo.runtime.sharded_logits import part_of_vocabulary
from octavo.speculative_config import Method
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Executor
from octavo.weights.dtypes import DTYPES

logger = logging.getLogger(__name__)


def make_storage(
    model: ModelConfig,
    loaded: LoadedModel,
    limits: memory_budget.Limits,
    config: EngineConfig,
    form: WeightFormat,
    collective: Collective,
    draft_specs: Sequence[LayerCacheSpec] = (),
) -> KVStorage:
    """The memory of the KV cache and of recurrent states; ``draft_specs``: of a drafter's layers."""
    dtype, device = resolve_kv_dtype(config.cache.kv_cache_dtype, form, (*model.cache, *draft_specs)), form.device
    num_dp_ranks, groups = limits.num_dp_ranks, limits.groups
    specs = rank_cache((*with_routes(model.cache, model.routes), *draft_specs), collective.size // num_dp_ranks)
    is_fp8 = dtype == torch.float8_e4m3fn
    if loaded.kv_scales and not is_fp8:
        logger.info("the checkpoint has scales for an FP8 KV cache, which kv_cache_dtype fp8 uses")
    scales = loaded.kv_scales if is_fp8 else {}
    states, num_parts = ONE_STATE, config.model.decode_context_parallel_size
    if limits.states is not None:
        states = StatePool(limits.states.num_slots, form.dtype, DTYPES[config.cache.state_dtype])
    if model.stage.count > 1:
        own = model.stage.layers(model.num_layers)
        specs, groups = own_cache(specs, own), tuple(group.within(own) for group in groups)
        scales = {i - own.start: scale for i, scale in scales.items() if i in own}
    return KVStorage(
        specs,
        groups,
        limits.num_blocks,
        limits.block_size,
        dtype,
        device,
        num_draft_layers=len(draft_specs),
        scales=scales,
        states=states,
        context=None if num_parts == 1 else ContextRanks(collective, num_parts),
        sequences=None if num_dp_ranks == 1 else collective,
    )


def step_limits(
    limits: memory_budget.Limits,
    model: ModelConfig,
    method: Method | None = None,
    drafter: Drafter | None = None,
    vision: Vision | None = None,
) -> StepLimits:
    """Upper bounds of a step: sequences, tokens, and blocks and drafts per sequence."""
    most = StepLimits(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        max_blocks=-(-limits.max_model_len // limits.block_size),
        max_drafts=0 if method is None else method.num_speculative_tokens,
        num_drafts=0 if drafter is None else drafter.num_drafts,
        has_rope_sets=model.rope_sets is not None,
        dense_context=model.dense_context if model.dense_context < limits.max_model_len else 0,
    )
    return most if vision is None else vision.limited(most)


class ExecutorParts(NamedTuple):
    """What an executor has besides the model, its storage and its limits."""

    pooler: Pooler
    adapters: ModelAdapters | None
    collective: Collective
    drafter: Drafter | None
    verify: Verify | None
    pool: EmbeddingPool | None
    updates: WeightUpdates | None
    experts: ExpertMoves | None
    link: StageLink | None


def make_executor(
    settings: ModelSettings,
    model: CausalLM,
    storage: KVStorage,
    vocab_size: int,
    most: StepLimits,
    parts: ExecutorParts,
) -> Executor:
    """The executor for the storage's device. Results on a CPU never depend on the batch."""
    device, eager, mode = storage.device, settings.enforce_eager, settings.logprobs_mode
    if device.type == "cpu":
        return HostExecutor(
            model,
            storage,
            vocab_size,
            most,
            forward=make_forward(model, storage.layers, device, eager or storage.sequences is not None),
            pooler=parts.pooler,
            adapters=parts.adapters,
            vocabulary=part_of_vocabulary(vocab_size, parts.collective, mode=mode),
            drafter=parts.drafter,
            verify=parts.verify,
            logits=make_logits(model, device, eager),
            embeddings=parts.pool,
            updates=parts.updates,
            experts=parts.experts,
            link=parts.link,
        )
    return StreamExecutor(
        model,
        storage,
        vocab_size,
        most,
        batch_invariant=settings.batch_invariant,
        enforce_eager=eager,
        pooler=parts.pooler,
        adapters=parts.adapters,
        vocabulary=part_of_vocabulary(vocab_size, parts.collective, is_on_host=False, mode=mode),
        drafter=parts.drafter,
        verify=parts.verify,
        embeddings=parts.pool,
        updates=parts.updates,
        experts=parts.experts,
    )
