"""Build an engine whose forward passes a worker computes, for the backend grpc."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from octavo.build.build_runner import make_grammars, make_runner
from octavo.build.device_settings import prepared_device
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.timing.step_times import logged
from octavo.errors import ConfigError
from octavo.models.layer_cache import KVGroup, LayerCacheSpec
from octavo.runtime import memory_budget
from octavo.runtime.executors.host_executor import HostExecutor
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.ranks.ranks import OnLost
from octavo.steps.limits import StepLimits
from octavo.system.addresses import is_loopback
from octavo.types import EngineInfo
from octavo.weights.folder import read_json
from octavo.weights.generation_config import FILE, chosen_config, in_vocabulary, sampling_defaults, token_ids
from octavo.weights.hub import resolve_model
from octavo_fleet.worker import credentials
from octavo_fleet.worker.connection import WorkerConnection, shown
from octavo_fleet.worker.remote_model import DTYPES, RemoteModel

LARGEST = {
    "vocab_size": 1 << 22,
    "block_size": 1 << 16,
    "num_blocks": 1 << 20,
    "max_model_len": 1 << 32,
}
"""Most that is believed of a worker; memory is reserved in proportion."""
MAX_POSITIONS = 1 << 28
"""Of all blocks together."""
MAX_TABLE_ENTRIES = 1 << 24
"""Blocks of all sequences of a step together."""


def build(config: EngineConfig, on_lost: OnLost | None = None) -> tuple[Engine, EngineInfo]:
    """Connect to the worker and wire the engine. Raises ``ConfigError`` or ``CheckpointError``.

    When the worker ends, ``on_lost`` is called with 1; steps raise ``WorkerLost``, also when it does not answer. The
    model's folder gives the tokenizer and the configuration; weights in it are not read.
    """
    assert config.model.grpc_worker is not None
    settings = config.model
    key, ca_certs = settings.grpc_api_key, settings.grpc_ssl_ca_certs
    if not is_loopback(config.model.grpc_worker) and None in (key, ca_certs):
        raise ConfigError(
            f"grpc_worker: {config.model.grpc_worker} may be another machine: give grpc_ssl_ca_certs, which verifies "
            "the worker's certificate, and grpc_api_key, which it asks for"
        )
    if key is not None:
        credentials.check_key(key, "grpc_api_key")
    connection = WorkerConnection(config.model.grpc_worker, settings.grpc_timeout, ca_certs, key)
    try:
        engine, info = _wired(config, connection)
    except BaseException:
        connection.close()
        raise
    connection.on_lost = on_lost
    weakref.finalize(engine, connection.close)  # frees the worker for another engine
    return engine, info


def _wired(config: EngineConfig, connection: WorkerConnection) -> tuple[Engine, EngineInfo]:
    settings = config.model
    device = prepared_device(dataclasses.replace(settings, device="cpu"))
    path = resolve_model(settings)
    own = read_json(path, "config.json") or {}
    generation = chosen_config(settings.generation_config, read_json(path, FILE) or {}, path)
    _check(config, connection.description, own)
    info = _info(config, connection.description, own, generation)
    storage = _storage(info, device)
    row_bytes = info.vocab_size * DTYPES[connection.description.logits_type].itemsize
    connection.expect_results(info.max_num_batched_tokens, row_bytes)
    most = StepLimits(info.max_num_seqs, info.max_num_batched_tokens, -(-info.max_model_len // info.block_size))
    executor = HostExecutor(RemoteModel(connection), storage, info.vocab_size, most)
    runner, warm_up = make_runner(settings, executor, storage, info.vocab_size, most)
    warm_up()
    cache = KVCache(
        info.num_kv_blocks,
        info.block_size,
        config.cache.enable_prefix_caching and connection.description.shares_blocks,
        eviction=config.cache.eviction_policy,
        watermark=config.cache.kv_watermark,
        events=KVEvents() if config.cache.enable_kv_events else None,
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        settings=config.scheduler,
    )
    grammars = make_grammars(settings, path, info.eos_token_ids)
    return Engine(scheduler, logged(runner, config.scheduler.step_log), grammars=grammars), info


def _storage(info: EngineInfo, device: torch.device) -> KVStorage:
    """Blocks that only count positions: their content is at the worker."""
    group = KVGroup((0,), 0)
    return KVStorage((LayerCacheSpec(1, 1),), (group,), (info.num_kv_blocks,), info.block_size, torch.float32, device)


def _check(config: EngineConfig, worker: Any, own: Mapping[str, Any]) -> None:
    """Compare what the worker says of itself with the settings, and with ``config.json``. Raises ``ConfigError``."""
    where = f"worker {config.model.grpc_worker}"
    for name, largest in LARGEST.items():
        if getattr(worker, name) < 1:
            raise ConfigError(f"{where}: {name} is missing from its description")
        if getattr(worker, name) > largest:
            raise ConfigError(f"{where}: {name} is {getattr(worker, name):,} in its description; at most {largest:,}")
    if worker.num_blocks * worker.block_size > MAX_POSITIONS:
        many = f"{worker.num_blocks:,} blocks of {worker.block_size:,} positions"
        raise ConfigError(f"{where}: {many} are more than {MAX_POSITIONS:,} positions")
    if not 0 <= worker.logits_type < len(DTYPES):
        raise ConfigError(f"{where}: logits_type {worker.logits_type} is not known")
    if own.get("vocab_size", worker.vocab_size) != worker.vocab_size:
        raise ConfigError(
            f"{where}: its model has a vocabulary of {worker.vocab_size} tokens, and config.json says "
            f"{own['vocab_size']}; give the folder of the model that the worker serves"
        )
    most = _longest(worker)
    if config.model.max_model_len is not None and config.model.max_model_len > most:
        raise ConfigError(f"max_model_len: {config.model.max_model_len} is more than the worker allows, {most}")
    for name, default in (("eviction_policy", "lru"), ("enable_kv_events", False)):
        if not worker.shares_blocks and getattr(config.cache, name) != default:
            raise ConfigError(f"{name}: the worker's sequences cannot share blocks, so there is no prefix cache")


def _longest(worker: Any) -> int:
    return min(int(worker.max_model_len), int(worker.num_blocks * worker.block_size))


def _info(config: EngineConfig, worker: Any, own: Mapping[str, Any], generation: Mapping[str, Any]) -> EngineInfo:
    max_num_seqs, max_num_batched_tokens = memory_budget.batch_limits(config.scheduler, memory_budget.DEFAULTS["cpu"])
    max_num_batched_tokens = min(max_num_batched_tokens, worker.max_num_batched_tokens or max_num_batched_tokens)
    max_num_seqs = min(max_num_seqs, worker.max_num_seqs or max_num_seqs, max_num_batched_tokens)
    max_model_len = config.model.max_model_len or _longest(worker)
    if max_num_seqs * -(-max_model_len // worker.block_size) > MAX_TABLE_ENTRIES:
        raise ConfigError(
            f"worker {config.model.grpc_worker}: {max_num_seqs:,} sequences of {max_model_len:,} tokens in blocks of "
            f"{worker.block_size:,} have more than {MAX_TABLE_ENTRIES:,} blocks; give max_model_len or max_num_seqs"
        )
    return EngineInfo(
        max_model_len=max_model_len,
        vocab_size=worker.vocab_size,
        eos_token_ids=in_vocabulary(
            token_ids(generation, "eos_token_id") or token_ids(own, "eos_token_id"), worker.vocab_size, "eos_token_id"
        ),
        block_size=worker.block_size,
        num_kv_blocks=worker.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        architecture=shown(worker.model),
        num_parameters=0,
        dtype=str(DTYPES[worker.logits_type]).removeprefix("torch."),
        device=f"worker {config.model.grpc_worker}",
        memory={},
        kernels={},
        sampling_defaults=sampling_defaults(config.model.generation_config, generation),
    )
