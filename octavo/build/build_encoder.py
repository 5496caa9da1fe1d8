"""Build an engine for an encoder: texts are batched by the scheduler and never chunked; there is no KV cache.

A text is one sequence with one block. The block is only an accounting unit: no storage is behind it.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from octavo.cache.kv_cache import KVCache
from octavo.config import EngineConfig, parse_lora_modules
from octavo.engine.engine import Engine
from octavo.engine.runner.adapter_numbers import LoadedAdapters
from octavo.engine.runner.encoder_runner import EncoderRunner
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.layers.lora import AdapterRows
from octavo.model_info import PoolingInfo
from octavo.models.encoder import EncoderConfig
from octavo.models.encoders import load_encoder
from octavo.models.labels import LabelPart
from octavo.models.linear_parts import MapPart
from octavo.models.model_adapters import ModelAdapters
from octavo.models.pooling import Pooling, longest_text, read_pooling
from octavo.ops import dispatch
from octavo.plugins import CPU
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.encoder_executor import EncoderExecutor
from octavo.runtime.executors.pooler import ROWS_AT_ONCE, Pooler
from octavo.runtime.memory_budget import keep_freed
from octavo.types import EngineInfo, Task
from octavo.weights.checkpoint import Checkpoint

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 4096
MAX_NUM_SEQS_GPU, MAX_NUM_BATCHED_TOKENS_GPU = 1024, 32_768
"""A GPU takes less time for them than the host does to prepare a step."""
MOST_RESULTS = 32 << 20
"""Bytes of the results of a GPU's step, if each text asks for vectors of its tokens, or for one of the vocabulary."""


_IN_LAYER = re.compile(r"\.\d+\.")


def build_encoder(
    config: EngineConfig, path: Path, checkpoint: Checkpoint, model: EncoderConfig, form: WeightFormat
) -> tuple[Engine, EngineInfo]:
    """Load the encoder and wire the engine. Raises ``ConfigError`` or ``CheckpointError``."""
    model, pooling = with_pooling(config, path, model)
    max_model_len, max_num_seqs, max_num_batched_tokens = encoder_limits(config, path, model, form.device)
    is_sparse = model.uses_vocabulary
    rows = AdapterRows() if config.model.enable_lora else None
    loaded = load_encoder(model, checkpoint, form, rows)
    adapters = None
    if rows is not None:
        maps, unused = adaptable(model, loaded.maps)
        adapters = ModelAdapters(maps, rows, form, unused)
    pooler = Pooler(pooling, loaded.model.labels, config.model.load_format, form, loaded.model.vocabulary)
    gc.collect()
    tasks = pooled_tasks(pooling, model.labels, model.vocab_size if is_sparse else model.hidden_size)
    executor, numbers = EncoderExecutor(loaded.model, pooler, form.device, adapters), dict[str, int]()
    runner = EncoderRunner(executor, tasks.names, numbers)
    runner.warm_up()
    lora = None if adapters is None else LoadedAdapters(executor, numbers, config.model.max_loras)
    for name, folder in parse_lora_modules(config.model.lora_modules).items():
        assert lora is not None
        lora.load(name, folder)
    num_blocks = 2 * max_num_seqs  # to admit a sequence, the scheduler needs a free block for each running one
    scheduler = Scheduler(
        KVCache(num_blocks, max_model_len, enable_prefix_caching=False),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        settings=config.scheduler,
        chunked_prefill=False,
    )
    activations = activation_bytes(model, max_num_seqs, max_num_batched_tokens, form.dtype)
    if form.device.type == CPU:
        keep_freed(2 * activations)
    choices = dispatch.choices(form.device.type, form.dtype)
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=(),
        block_size=max_model_len,
        num_kv_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        architecture=model.architecture,
        num_parameters=loaded.num_parameters,
        dtype=str(form.dtype).removeprefix("torch."),
        device=str(form.device),
        memory={"weights": loaded.num_bytes, "activations": activations},
        weight_bytes=dict(loaded.bytes_by_format),
        kernels={choice.op: choice.kernel for choice in choices if choice.chosen},
        tasks=tasks.names,
        embedding_size=tasks.embedding_size,
        pooling=tasks.meaning,
    )
    return Engine(scheduler, runner, adapters=lora), info


def with_pooling(config: EngineConfig, path: Path, model: EncoderConfig) -> tuple[EncoderConfig, Pooling]:
    """The model with the head that its pooling needs, and that. Raises ``ConfigError`` or ``CheckpointError``."""
    pooling = read_pooling(
        config.model.config_folder(path),
        config.model.pooling_type,
        is_encoder=True,
        load_format=config.model.load_format,
    )
    is_sparse = pooling.kind == "splade"
    if is_sparse and model.vocabulary is None:
        message = "a vector of the vocabulary needs a BertForMaskedLM, DistilBertForMaskedLM or one of RoBERTa's kind"
        raise ConfigError(f"pooling_type: splade: {message}; the checkpoint has {model.architecture}")
    return dataclasses.replace(model, uses_vocabulary=is_sparse), pooling


def adaptable(model: EncoderConfig, maps: Mapping[str, MapPart]) -> tuple[dict[str, MapPart], tuple[str, ...]]:
    """The maps in layers, which adapters may change, and the names of heads that adapters may have since they are not
    computed; those of heads that are computed are refused. Raises ``ConfigError``."""
    if model.architecture.startswith("Deberta"):
        raise ConfigError("enable_lora: not for DeBERTa, whose queries and keys of positions are computed once for all")
    has_heads = model.uses_vocabulary or model.labels is not None
    unused = () if has_heads else (*model.left_out, *(model.root + name for name in model.left_out))
    return {name: part for name, part in maps.items() if _IN_LAYER.search(name)}, unused


class PooledTasks(NamedTuple):
    """What a model does but generate."""

    names: tuple[Task, ...]
    embedding_size: int
    meaning: PoolingInfo


def pooled_tasks(pooling: Pooling, labels: LabelPart | None, width: int) -> PooledTasks:
    """The tasks other than "generate" of a model of this width. Raises ``CheckpointError``."""
    if labels is not None:
        meaning = PoolingInfo(labels=labels.names, activation=labels.activation)
        if labels.of == "each":
            return PooledTasks(("token_classify",), 0, meaning)
        return PooledTasks(("score", "classify") if len(labels.names) == 1 else ("classify",), 0, meaning)
    if pooling.kind == "splade":
        return PooledTasks(("embed",), width, PoolingInfo(False, is_sparse=True))
    of_token, of_text = pooling.sizes(width)
    meaning = PoolingInfo(pooling.normalizes, of_token)
    if pooling.is_of_tokens:
        return PooledTasks(("token_embed",), 0, meaning)
    if pooling.vectors:
        meaning = PoolingInfo(pooling.normalizes, of_token, labels=("weight",), activation="none")
        return PooledTasks(("embed", "token_embed", "token_classify"), of_text, meaning)
    return PooledTasks(("embed", "token_embed"), of_text, meaning)


def _check_settings(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for settings that concern generated tokens or several devices."""
    if config.model.num_ranks > 1:
        raise ConfigError("tensor_parallel_size and pipeline_parallel_size: an encoder runs on one device")
    if config.model.enable_return_routed_experts:
        raise ConfigError("enable_return_routed_experts: an encoder has no routers of experts")
    for name in ("max_itl", "tpot_target"):
        if getattr(config.scheduler, name) is not None:
            raise ConfigError(f"{name}: does not apply to an encoder, which generates no tokens")
    if config.model.merge_lora or (config.model.lora_modules and not config.model.enable_lora):
        raise ConfigError("lora_modules: an encoder needs enable_lora; merge_lora is for decoders")
    if config.speculative.speculative_config is not None:
        raise ConfigError("speculative_config: does not apply to an encoder, which generates no tokens")


class EncoderLimits(NamedTuple):
    """The resolved limits of an encoder; names as in the settings."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def encoder_limits(config: EngineConfig, path: Path, model: EncoderConfig, device: torch.device) -> EncoderLimits:
    """Resolve the limits that the settings leave open. Raises ``ConfigError``."""
    _check_settings(config)
    requested = config.scheduler
    max_model_len = _longest(config.model.max_model_len, model, path)
    seqs, tokens = MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS
    if device.type != CPU:
        tokens = max(tokens, min(MAX_NUM_BATCHED_TOKENS_GPU, MOST_RESULTS // (4 * model.hidden_size)))
        most = MOST_RESULTS // (4 * model.vocab_size) if model.uses_vocabulary else MAX_NUM_SEQS_GPU
        seqs = max(seqs, min(MAX_NUM_SEQS_GPU, most))
    max_num_batched_tokens = requested.max_num_batched_tokens or max(tokens, max_model_len, requested.max_num_seqs or 0)
    if max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: an encoder cannot chunk texts, so it must be at least max_model_len, "
            f"{max_model_len}; it is {max_num_batched_tokens}"
        )
    return EncoderLimits(
        max_model_len, requested.max_num_seqs or min(seqs, max_num_batched_tokens), max_num_batched_tokens
    )


def _longest(requested: int | None, model: EncoderConfig, path: Path) -> int:
    """``max_model_len``: the setting, else the model's recommended length; at most the size of its position table."""
    most = model.max_position_embeddings
    if requested is not None and requested > most:
        raise ConfigError(f"max_model_len: {requested} exceeds the model's maximum of {most} positions")
    return requested or min(most, longest_text(path) or most)


def activation_bytes(model: EncoderConfig, num_seqs: int, num_tokens: int, dtype: torch.dtype) -> int:
    """Activation bytes of a step: the residual stream, plus the larger of attention and the feed-forward layer before
    and after its GELU; of a vector of the vocabulary, each text's twice, and logits as they come and in float32."""
    layers = num_tokens * (model.hidden_size + max(4 * model.hidden_size, 2 * model.ffn_size)) * dtype.itemsize
    if not model.uses_vocabulary:
        return layers
    return layers + model.vocab_size * (8 * num_seqs + min(ROWS_AT_ONCE, num_tokens) * (dtype.itemsize + 4))
