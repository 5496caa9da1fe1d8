"""The backend transformers: the loading of a model, and settings that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.model_config import ModelConfig
from octavo.models.registry import LoadedModel
from octavo.ops.device_backend import is_gpu
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime import memory_budget
from octavo_fleet.transformers.model import TransformersConfig, load_transformers
from octavo_fleet.transformers.own_cache import OwnCacheTransformer


def read_model(config: EngineConfig, path: Path, form: WeightFormat) -> tuple[EngineConfig, ModelConfig]:
    """See ``ModelBackend``: only a loaded model says what it caches."""
    model = load_transformers(path, form, config.model.max_model_len)
    return own_settings(config, model, form.device), model


def describe(model: ModelConfig) -> Iterator[str]:
    """See ``ModelBackend``; only a trial shows how a model can be served."""
    assert isinstance(model, TransformersConfig)
    assert model.loaded is not None
    own = f"a cache of its own for each sequence, one sequence at a time, as {model.not_paged}"
    kept = own if model.not_paged else "the paged KV cache"
    yield f"{model.architecture}: supported by backend transformers, with {kept}"
    yield f"{model.loaded.num_parameters:,} parameters, {model.loaded.num_bytes / 2**20:,.1f} MiB of weights"


def load_model(model: ModelConfig) -> LoadedModel:
    """See ``ModelBackend``."""
    assert isinstance(model, TransformersConfig)
    assert model.loaded is not None
    return model.loaded


def own_settings(config: EngineConfig, model: TransformersConfig, device: torch.device) -> EngineConfig:
    """``config`` as it applies to ``model``. Raises ``ConfigError``.

    Not every model of transformers can be captured in graphs. One with a cache of its own has no prefix cache, and its
    KV blocks only count tokens.
    """
    eager = config.model.enforce_eager or model.is_eager
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, enforce_eager=eager))
    if not model.not_paged:
        return config
    for name, default in (("eviction_policy", "lru"), ("enable_kv_events", False)):
        if getattr(config.cache, name) != default:
            raise ConfigError(f"{name}: {model.architecture} keeps a cache of its own, so it has no prefix cache")
    block_size = config.cache.block_size or memory_budget.DEFAULTS[device.type].block_size
    num_blocks = config.cache.num_kv_blocks or _num_blocks(config, model, block_size, device)
    assert model.loaded is not None
    assert isinstance(model.loaded.model, OwnCacheTransformer)
    model.loaded.model.max_tokens = num_blocks * block_size
    cache = dataclasses.replace(
        config.cache,
        enable_prefix_caching=False,
        enable_partial_reuse=False,
        num_kv_blocks=num_blocks,
        kv_cache_memory=None,
    )
    return dataclasses.replace(config, cache=cache)


def _num_blocks(config: EngineConfig, model: TransformersConfig, block_size: int, device: torch.device) -> int:
    """Blocks for ``max_num_seqs`` full contexts, or as many as fit into ``kv_cache_memory``, of a GPU by default what
    is free, if each layer kept keys and values of the model's full width in float32, which few do; at least one
    context."""
    max_len = config.model.max_model_len or model.max_position_embeddings
    per_seq = -(-max_len // block_size)
    count = config.scheduler.max_num_seqs or memory_budget.DEFAULTS[device.type].max_num_seqs
    given = config.cache.kv_cache_memory
    if given is not None:
        size = given * memory_budget.GIB
    elif is_gpu(device):  # which the model is on already
        size = memory_budget.free_memory(device, config.cache.gpu_memory_utilization)
    else:
        size = memory_budget.CPU_KV_MEMORY
    per_block = 2 * model.num_layers * model.hidden_size * 4 * block_size
    return max(per_seq, min(count * per_seq, int(size // per_block)))
