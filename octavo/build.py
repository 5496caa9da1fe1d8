"""Puts an engine together: the one module that names every concrete part."""

from __future__ import annotations

import contextlib
import gc
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from octavo import ops
from octavo.build_encoder import build_encoder
from octavo.cache.hybrid_cache import HybridCache
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.cache.offloading import make_offload
from octavo.config import CacheSettings, EngineConfig, ModelSettings
from octavo.engine.engine import Engine
from octavo.engine.mixed_steps import settle_mixed_steps
from octavo.engine.ngram import NgramProposer
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_times import logged
from octavo.errors import ConfigError
from octavo.grammar.masks import MatcherMasks
from octavo.grammar.matchers import GrammarError
from octavo.grammar.vocabulary import Vocabulary
from octavo.layers.stacked_lora import StackedRows
from octavo.models.adapters import Adapters, load_with_adapters
from octavo.models.bert import EncoderConfig
from octavo.models.config import ModelConfig
from octavo.models.pooling import Pooling, read_pooling
from octavo.models.registry import CausalLM, read_config
from octavo.models.sizes import check_dummy, check_sizes, eos_token_ids
from octavo.ops import dispatch
from octavo.quant.scheme import WeightFormat, best_scheme
from octavo.runtime import memory
from octavo.runtime.block_copies import BlockCopies, DeviceBlockCopies, HostBlockCopies
from octavo.runtime.cpu_threads import num_threads_wanted
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.model_runner import LAST_TOKEN, Forward, ModelRunner
from octavo.runtime.step_program import StepLimits, load_kernels
from octavo.runtime.stream_runner import StreamRunner
from octavo.speculative_config import parse_speculative_config
from octavo.telemetry.phases import Phases
from octavo.text.tokenizer import load_tokenizer
from octavo.types import EngineInfo
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.generation_config import chosen_config, sampling_defaults
from octavo.weights.hub import resolve_model

DEPTH = {"cpu": 1, "cuda": 2}
"""Steps in flight: beside a GPU, the next step is decided while one is computed. Not so with guesses: they follow the
last token, which must be known."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    """Load the model and wire the engine. Raises ``ConfigError`` or ``CheckpointError``."""
    phases = Phases()
    device = resolve_device(config.model.device)
    _prepare(device)
    path = resolve_model(config.model)
    checkpoint = open_checkpoint(path, config.model.load_format, config.model.seed, str(device))
    generation = chosen_config(config.model.generation_config, checkpoint.generation_config, path)
    defaults = sampling_defaults(config.model.generation_config, generation)
    model_config, form = _read_model(config, checkpoint, device)
    eos_ids = eos_token_ids(model_config, generation)
    phases.done("device and checkpoint")
    if isinstance(model_config, EncoderConfig):
        return build_encoder(config, path, checkpoint, model_config, form)
    pooling = read_pooling(path, config.model.pooling_type, is_encoder=False)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, form, device)
    with _compiling_beside(form, kv_dtype):
        loaded, adapters = load_with_adapters(config.model, model_config, checkpoint, form)
        gc.collect()
        phases.done("weights")
        free = memory.free_memory(device, config.cache.gpu_memory_utilization)
        kinds = kv_dtype, form.dtype, device.type
        limits, budget = memory.settle(config, model_config, *kinds, weights=loaded.num_bytes, free=free)
        storage = _storage(model_config, limits, kv_dtype, device)
        runner = make_runner(config.model, loaded.model, storage, model_config.vocab_size, limits, pooling, adapters)
        phases.done("memory")
        runner.warm_up()
        phases.done("kernels and graphs")
    info = EngineInfo(
        max_model_len=limits.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=eos_ids,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks,
        num_window_blocks=limits.num_window_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        architecture=model_config.architecture,
        num_parameters=loaded.num_parameters,
        dtype=str(form.dtype).removeprefix("torch."),
        device=str(device),
        memory=budget.as_dict(),
        kernels={choice.op: choice.kernel for choice in dispatch.choices(device.type, form.dtype) if choice.chosen},
        tasks=("generate", "embed"),
        embedding_size=model_config.hidden_size,
        sampling_defaults=defaults,
    )
    grammars = MatcherMasks(lambda: _vocabulary(config.model, path, info))
    scheduler = _scheduler(config, limits, model_config, 0 if device.type == "cpu" else loaded.num_bytes)
    copies = _copies(storage, runner)
    if config.cache.enable_partial_reuse:
        _copy_parts(scheduler.cache, copies)
    forms = _forms(form, info, storage)
    if (offload := make_offload(config.cache, copies, storage.block_size, path, forms)) is not None:
        scheduler.cache.use_offload(offload)
    ngram = parse_speculative_config(config.speculative.speculative_config)
    proposer = None if ngram is None else NgramProposer(ngram)
    depth = DEPTH[device.type] if config.scheduler.async_scheduling and ngram is None else 1
    timed = logged(runner, config.scheduler.step_log)
    return Engine(scheduler, timed, grammars=grammars, proposer=proposer, adapters=adapters, depth=depth), info


def _read_model(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> tuple[ModelConfig, WeightFormat]:
    """The model's configuration, whose sizes can be true, and the format of its weights."""
    model = read_config(checkpoint.config, config.model.max_model_len)
    check_sizes(model, checkpoint)
    form = weight_format(config.model, device, checkpoint)
    if checkpoint.is_dummy:
        free = memory.free_memory(device, config.cache.gpu_memory_utilization)
        check_dummy(model, checkpoint, form.dtype, free)
    return model, form


def _storage(model: ModelConfig, limits: memory.Limits, dtype: torch.dtype, device: torch.device) -> KVStorage:
    return KVStorage(model, limits.num_kv_blocks, limits.block_size, dtype, device, limits.num_window_blocks)


def _copies(storage: KVStorage, runner: ModelRunner | StreamRunner) -> BlockCopies:
    queue = runner.queue if isinstance(runner, StreamRunner) else None
    return HostBlockCopies(storage) if queue is None else DeviceBlockCopies(storage, queue)


def _forms(form: WeightFormat, info: EngineInfo, storage: KVStorage) -> str:
    """What cached keys and values depend on besides the checkpoint, the same in each process."""
    pool = storage.pool
    return f"{form.dtype} {type(form.scheme).__name__} {info.kernels}\n{pool.dtype}\n{pool.device.type}"


def _copy_parts(cache: KVCache, copies: BlockCopies) -> None:
    cache.copy_slots = copies.copy_slots
    if cache.whole is not cache:
        cache.whole.copy_slots = copies.copy_whole_slots


def _cache(settings: CacheSettings, limits: memory.Limits, model: ModelConfig) -> KVCache:
    sizes = limits.num_kv_blocks, limits.block_size, settings.enable_prefix_caching
    policy, watermark = settings.eviction_policy, settings.kv_watermark
    events = KVEvents() if settings.enable_kv_events else None
    if limits.num_window_blocks:
        return HybridCache(
            limits.num_window_blocks, *sizes, window=model.window, eviction=policy, watermark=watermark, events=events
        )
    window = 0 if model.whole_layers else model.window
    return KVCache(*sizes, eviction=policy, watermark=watermark, window=window, events=events)


def _scheduler(config: EngineConfig, limits: memory.Limits, model: ModelConfig, bytes_on_gpu: int) -> Scheduler:
    return Scheduler(
        _cache(config.cache, limits, model),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        settings=settle_mixed_steps(config.scheduler, bytes_on_gpu),
    )


def _vocabulary(settings: ModelSettings, path: Path, info: EngineInfo) -> Vocabulary:
    """What grammars need of the tokenizer, which the engine needs for nothing else. Raises ``GrammarError``."""
    tokenizer = load_tokenizer(Path(settings.tokenizer or path))
    if tokenizer is None:
        raise GrammarError("cannot be used: the model has no tokenizer")
    return tokenizer.vocabulary(info.eos_token_ids)


def make_runner(
    settings: ModelSettings,
    model: CausalLM,
    storage: KVStorage,
    vocab_size: int,
    limits: memory.Limits,
    pooling: Pooling = LAST_TOKEN,
    adapters: Adapters | None = None,
) -> ModelRunner | StreamRunner:
    """The runner for the storage's device. What a CPU computes never depends on the batch."""
    if storage.pool.device.type == "cpu":
        forward = None if settings.enforce_eager else _recorded(model, storage)
        rows = None if adapters is None else adapters.rows
        return ModelRunner(model, storage, vocab_size, forward, pooling, rows)
    max_blocks = -(-limits.max_model_len // limits.block_size)
    most = StepLimits(limits.max_num_seqs, limits.max_num_batched_tokens, max_blocks)
    rows = None if adapters is None or not isinstance(adapters.rows, StackedRows) else adapters.rows
    return StreamRunner(
        model, storage, vocab_size, most, settings.batch_invariant, settings.enforce_eager, pooling, rows
    )


def _recorded(model: CausalLM, storage: KVStorage) -> Forward | None:
    """A forward pass that repeats recorded calls, where there are kernels whose calls can be recorded."""
    if ops.linear.chosen("cpu", torch.float32) == dispatch.REFERENCE:
        return None
    from octavo.runtime.recorded_forward import RecordedForward

    return RecordedForward(model, storage.layers)


def _compiling_beside(form: WeightFormat, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
    """A block in which kernels are compiled on two cores, where there are any to compile."""
    if form.device.type != "cpu" or ops.attention.chosen("cpu", form.dtype) == dispatch.REFERENCE:
        return contextlib.nullcontext()
    from octavo.ops.cpu.attention import compiling_beside

    return compiling_beside(kv_dtype)


def _prepare(device: torch.device) -> None:
    """What is to be done before, or beside, the loading of the model."""
    if device.type == "cpu":
        _share_cores(num_threads_wanted())
    else:
        load_kernels()


def _share_cores(count: int) -> None:
    """Give the cores to the kernels' own threads where there are kernels: torch's, spinning, would take them away."""
    if ops.linear.chosen("cpu", torch.float32) == dispatch.REFERENCE:
        torch.set_num_threads(count)
        return
    from octavo.ops.cpu import threads

    torch.set_num_threads(1)
    threads.set_num_threads(count)


def resolve_kv_dtype(name: str, form: WeightFormat, device: torch.device) -> torch.dtype:
    """The type of cached keys and values of a setting; "auto" is what suits the weights. Raises ``ConfigError``."""
    if name == "fp8":
        if device.type == "cpu":
            raise ConfigError("kv_cache_dtype: fp8 is for GPUs; on a CPU take bfloat16 or float16")
        return torch.float8_e4m3fn
    return DTYPES.get(name, form.kv_dtype)


def resolve_device(name: str) -> torch.device:
    """The device of a setting; "auto" takes a GPU when there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no CUDA device here")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def weight_format(settings: ModelSettings, device: torch.device, checkpoint: Checkpoint) -> WeightFormat:
    """The form of weights and activations.

    A dtype that is asked for is honoured, exactly: blocks are made dense. "auto" is float32 on a CPU, with block
    weights kept as they are where a scheme computes with them well, and on a GPU the checkpoint's own type when
    that is a 16-bit one, else bfloat16.
    """
    if settings.dtype != "auto":
        return WeightFormat(DTYPES[settings.dtype], device)
    if device.type == "cpu":
        return WeightFormat(torch.float32, device, best_scheme(device) if checkpoint.has_blocks else None)
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return WeightFormat(torch.float16 if own == "float16" else torch.bfloat16, device)
