"""Ways to place a model on GPUs: what fits by the arithmetic of a start, and how fast it is by the roofline."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.build.device_settings import resolve_kv_dtype, weight_format
from octavo.config import EngineConfig, ModelSettings
from octavo.engine.timing.step_model import StepWork
from octavo.errors import CheckpointError, ConfigError
from octavo.models.encoder import EncoderConfig
from octavo.models.encoders import LoadedEncoder
from octavo.models.meta_model import outline
from octavo.models.model_config import ModelConfig
from octavo.models.multimodal_text import overridden_config
from octavo.models.registry import LoadedModel, read_config
from octavo.ops.device_backend import backend_of
from octavo.plugins import GPU
from octavo.quant.stored.stored_weight import WeightFormat, dtype_name
from octavo.runtime import memory_budget
from octavo.runtime.ranks.ranks import check_divides
from octavo.weights.dummy import DummyCheckpoint
from octavo_fleet.sim.costs.cost_model import Roofline
from octavo_fleet.sim.costs.devices import Device
from octavo_fleet.sim.costs.roofline import Shape, shape_of

AT_LOAD = (None, "fp8", "int4")
"""How weights that are not quantised may be."""
KV_TYPES = ("auto", "fp8")
LARGEST_GROUP = 8
"""GPUs among which a model is divided, at most."""


@dataclass(frozen=True)
class Placement:
    """One way, and what comes of it; ``None`` for what is not known or does not fit."""

    tensor_parallel_size: int
    data_parallel_size: int
    quantization: str
    kv_cache_dtype: str
    flags: str
    """Of ``octavo serve``."""
    is_exact: bool
    """Whether no number is rounded that the checkpoint and the device would keep."""
    problem: str | None = None
    """Why it does not fit."""
    weight_gib: float | None = None
    """On each GPU."""
    max_model_len: int | None = None
    cached_tokens: int | None = None
    """Of all engines together."""
    concurrent: int | None = None
    """Sequences of the context asked for that are decoded at once, by all engines together."""
    tokens_per_second: float | None = None
    seconds_per_token: float | None = None
    """Of one sequence alone."""


def placements(
    config: EngineConfig, values: Mapping[str, Any], device: Device, count: int, context: int, num_parts: int = 1
) -> list[Placement]:
    """The ways for a model of these keys of a ``config.json`` on ``count`` devices, the fastest that fit first.

    ``num_parts``: of an engine's devices, how many divide each sequence's KV cache. A setting that differs from its
    default is not varied. Raises ``ConfigError`` and ``CheckpointError``.
    """
    keys = overridden_config(values, config.model.hf_overrides)
    model = read_config(keys, config.model.max_model_len)
    if isinstance(model, EncoderConfig):
        raise ConfigError("model: is an encoder, which runs on one device; ask `octavo models`")
    sizes = [size for size in range(1, min(count, LARGEST_GROUP) + 1) if count % size == 0]
    is_stored = keys.get("quantization_config") is not None
    methods = [config.model.quantization] if config.model.quantization or is_stored else AT_LOAD
    kinds = KV_TYPES if config.cache.kv_cache_dtype == "auto" else [config.cache.kv_cache_dtype]
    shape, checkpoint = _shape(keys), DummyCheckpoint(keys, {}, 0, device="meta")
    outlined = functools.cache(functools.partial(outline, model, checkpoint))  # one for all types of the KV cache
    parts = [(size, count // size, num_parts) for size in sizes]
    found = [
        _placed(config, checkpoint, outlined, model, shape, device, divided, method, kind, context)
        for divided, method in itertools.product(parts, methods)
        for kind in kinds
    ]
    return sorted(found, key=lambda way: (way.problem is not None, -(way.tokens_per_second or 0)))


def _shape(keys: Mapping[str, Any]) -> Shape | None:
    """``None`` for models whose work is not counted."""
    try:
        return shape_of(keys)
    except ConfigError:
        return None


def _placed(
    config: EngineConfig,
    checkpoint: DummyCheckpoint,
    outlined: Callable[[WeightFormat, int], LoadedModel | LoadedEncoder],
    model: ModelConfig,
    shape: Shape | None,
    device: Device,
    sizes: tuple[int, int, int],
    method: str | None,
    kind: str,
    context: int,
) -> Placement:
    size, engines, num_parts = sizes
    settings = dataclasses.replace(
        config.model, quantization=method, tensor_parallel_size=size, decode_context_parallel_size=num_parts
    )
    cache = dataclasses.replace(config.cache, kv_cache_dtype=kind)
    config = dataclasses.replace(config, model=settings, cache=cache)
    gpu = torch.device(GPU)
    form = weight_format(settings, gpu, checkpoint)
    kv_dtype = resolve_kv_dtype(kind, form, model.cache)
    stored = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    way = Placement(
        size,
        engines,
        quantization=method or stored or dtype_name(form.dtype),
        kv_cache_dtype="fp8" if kind == "fp8" else dtype_name(kv_dtype),
        flags="".join(_flags(settings, engines, method, kind)),
        is_exact=method is None and kind == "auto",
    )
    try:
        check_divides(model, settings, gpu)
        loaded = outlined(form, size)
        free = int(device.memory * cache.gpu_memory_utilization) - loaded.num_bytes
        free -= backend_of(GPU).peer_bytes(size)
        limits, _ = memory_budget.plan_memory(
            config, model, kv_dtype, form.dtype, GPU, weights=loaded.bytes_by_format, free=free, num_ranks=size
        )
    except (ConfigError, CheckpointError) as error:
        return dataclasses.replace(way, problem=str(error))
    cached = limits.num_cached_tokens
    concurrent = min(limits.max_num_seqs, cached // min(context, limits.max_model_len))
    way = dataclasses.replace(
        way,
        weight_gib=loaded.num_bytes / memory_budget.GIB,
        max_model_len=limits.max_model_len,
        cached_tokens=engines * cached,
        concurrent=engines * concurrent,
    )
    if shape is None or context > limits.max_model_len:
        return way
    weight_bytes = size * loaded.num_bytes / loaded.num_parameters
    cost = Roofline(shape, device, size, weight_bytes, kv_dtype.itemsize, num_parts)
    together, alone = (cost.seconds(StepWork(n, n, n * context, n * context)) for n in (concurrent, 1))
    return dataclasses.replace(way, tokens_per_second=engines * concurrent / together, seconds_per_token=alone)


def _flags(settings: ModelSettings, engines: int, method: str | None, kind: str) -> Iterator[str]:
    if settings.tensor_parallel_size > 1:
        yield f" --tensor-parallel-size {settings.tensor_parallel_size}"
    if settings.decode_context_parallel_size > 1:
        yield f" --decode-context-parallel-size {settings.decode_context_parallel_size}"
    if settings.enable_expert_parallel:
        yield " --enable-expert-parallel"
    if engines > 1:
        yield f" --data-parallel-size {engines}"
    if method is not None:
        yield f" --quantization {method}"
    if kind != "auto":
        yield f" --kv-cache-dtype {kind}"
