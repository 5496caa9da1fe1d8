"""Build an engine: the only module that names every concrete class."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from octavo import ops
from octavo.build_encoder import build_encoder
from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.cache.offloading import make_offload
from octavo.config import CacheSettings, EngineConfig, ModelSettings, parse_lora_modules
from octavo.engine.adapters import LoadedAdapters
from octavo.engine.engine import Engine
from octavo.engine.graph_choice import GraphChoice
from octavo.engine.kernel_tuning import TuningPlan, tune_kernels
from octavo.engine.mixed_steps import settle_mixed_steps
from octavo.engine.ngram import NgramProposer
from octavo.engine.persistent_batch import PersistentBatch
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_encoder import StepEncoder
from octavo.engine.step_runner import BlockMessages, StepRunner, compute_padding
from octavo.engine.step_times import logged
from octavo.errors import ConfigError
from octavo.grammar.masks import MatcherMasks
from octavo.grammar.matchers import GrammarError
from octavo.grammar.vocabulary import Vocabulary
from octavo.models.adapters import Adapters, load_with_adapters
from octavo.models.bert import EncoderConfig
from octavo.models.config import ModelConfig
from octavo.models.pooling import Pooling, read_pooling
from octavo.models.registry import CausalLM, read_config
from octavo.models.sizes import check_dummy, check_sizes, eos_token_ids
from octavo.ops import dispatch
from octavo.quant.blocks import without_kernel
from octavo.quant.stored import WeightFormat
from octavo.runtime import memory
from octavo.runtime.cpu_threads import default_num_threads
from octavo.runtime.device_program import load_kernels
from octavo.runtime.host_executor import LAST_TOKEN, HostExecutor
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.step_program import Forward
from octavo.runtime.stream_executor import StreamExecutor
from octavo.speculative_config import parse_speculative_config
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Executor
from octavo.steps.shapes import exact_shape
from octavo.telemetry.phases import Phases
from octavo.text.tokenizer import load_tokenizer
from octavo.types import EngineInfo
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.generation_config import chosen_config, sampling_defaults
from octavo.weights.hub import resolve_model

DEPTH = {"cpu": 1, "cuda": 2}
"""Steps in flight: on a GPU, the next step is scheduled while one is computed. Not with speculation: drafts depend on
the last token, which must be known."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: EngineConfig, tuning: TuningPlan | None = None) -> tuple[Engine, EngineInfo]:
    """Load the model and wire the engine; see ``make_runner``. Raises ``ConfigError`` or ``CheckpointError``."""
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
    with _kernel_compilation(form, kv_dtype):
        loaded, adapters = load_with_adapters(config.model, model_config, checkpoint, form)
        gc.collect()
        phases.done("weights")
        free = memory.free_memory(device, config.cache.gpu_memory_utilization)
        kinds = kv_dtype, form.dtype, device.type
        limits, budget = memory.settle(config, model_config, *kinds, weights=loaded.num_bytes, free=free)
        storage = _storage(model_config, limits, kv_dtype, device)
        vocab_size = model_config.vocab_size
        executor = make_executor(config.model, loaded.model, storage, vocab_size, limits, pooling, adapters)
        numbers = None if adapters is None else dict[str, int]()
        groups = storage.num_groups
        runner, warm_up = make_runner(config.model, executor, groups, vocab_size, limits, numbers, tuning)
        phases.done("memory")
        warm_up()
        phases.done("kernels and graphs")
    info = EngineInfo(
        max_model_len=limits.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=eos_ids,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks,
        kv_groups=limits.kv_groups,
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
    scheduler = _scheduler(config, limits, 0 if device.type == "cpu" else loaded.num_bytes)
    _connect_blocks(scheduler.cache, config.cache, runner, storage, path, _forms(form, info, storage))
    lora = None if numbers is None else _load_adapters(config.model, runner, numbers)
    ngram = parse_speculative_config(config.speculative.speculative_config)
    proposer = None if ngram is None else NgramProposer(ngram)
    depth = DEPTH[device.type] if config.scheduler.async_scheduling and ngram is None else 1
    timed = logged(runner, config.scheduler.step_log)
    return Engine(scheduler, timed, grammars=grammars, proposer=proposer, adapters=lora, depth=depth), info


def _load_adapters(settings: ModelSettings, runner: StepRunner, numbers: dict[str, int]) -> LoadedAdapters:
    adapters = LoadedAdapters(runner, numbers, settings.max_loras)
    for name, folder in parse_lora_modules(settings.lora_modules).items():
        adapters.load(name, folder)
    return adapters


def _connect_blocks(
    cache: KVCache, settings: CacheSettings, runner: StepRunner, storage: KVStorage, model: Path, forms: str
) -> None:
    """Connect partial block reuse and KV offloading to the cache, if the settings enable them."""
    blocks = BlockMessages(runner, storage.bytes_per_block)
    if settings.enable_partial_reuse:
        cache.copy_slots = blocks.copy_slots
    if (offload := make_offload(settings, blocks, storage.block_size, model, forms)) is not None:
        cache.use_offload(offload)


def _read_model(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> tuple[ModelConfig, WeightFormat]:
    """The model's configuration, checked against the checkpoint, and the format of its weights."""
    model = read_config(checkpoint.config, config.model.max_model_len)
    check_sizes(model, checkpoint)
    form = weight_format(config.model, device, checkpoint)
    if checkpoint.is_dummy:
        free = memory.free_memory(device, config.cache.gpu_memory_utilization)
        check_dummy(model, checkpoint, form.dtype, free)
    return model, form


def _storage(model: ModelConfig, limits: memory.Limits, dtype: torch.dtype, device: torch.device) -> KVStorage:
    return KVStorage(model.cache, limits.groups, limits.num_blocks, limits.block_size, dtype, device)


def _cache(settings: CacheSettings, limits: memory.Limits) -> KVCache:
    groups = zip(limits.groups, limits.num_blocks, strict=True)
    return KVCache(
        [GroupSize(num_blocks, group.window) for group, num_blocks in groups],
        limits.block_size,
        settings.enable_prefix_caching,
        eviction=settings.eviction_policy,
        watermark=settings.kv_watermark,
        events=KVEvents() if settings.enable_kv_events else None,
    )


def _forms(form: WeightFormat, info: EngineInfo, storage: KVStorage) -> str:
    """What cached keys and values depend on besides the checkpoint, as a string that is equal in every process."""
    return f"{form.dtype} {form.packs} {info.kernels}\n{storage.dtype}\n{storage.device.type}"


def _scheduler(config: EngineConfig, limits: memory.Limits, bytes_on_gpu: int) -> Scheduler:
    return Scheduler(
        _cache(config.cache, limits),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        settings=settle_mixed_steps(config.scheduler, bytes_on_gpu),
    )


def _vocabulary(settings: ModelSettings, path: Path, info: EngineInfo) -> Vocabulary:
    """The tokenizer's vocabulary for grammars; the engine has no other use of a tokenizer. Raises ``GrammarError``."""
    tokenizer = load_tokenizer(Path(settings.tokenizer or path))
    if tokenizer is None:
        raise GrammarError("cannot be used: the model has no tokenizer")
    return tokenizer.vocabulary(info.eos_token_ids)


def make_executor(
    settings: ModelSettings,
    model: CausalLM,
    storage: KVStorage,
    vocab_size: int,
    limits: memory.Limits,
    pooling: Pooling = LAST_TOKEN,
    adapters: Adapters | None = None,
) -> Executor:
    """The executor for the storage's device. Results on a CPU never depend on the batch."""
    most = step_limits(limits)
    if storage.device.type == "cpu":
        forward = None if settings.enforce_eager else _recorded(model, storage)
        return HostExecutor(model, storage, vocab_size, most, forward, pooling, adapters)
    return StreamExecutor(
        model, storage, vocab_size, most, settings.batch_invariant, settings.enforce_eager, pooling, adapters
    )


def make_runner(
    settings: ModelSettings,
    executor: Executor,
    num_groups: int,
    vocab_size: int,
    limits: memory.Limits,
    adapters: dict[str, int] | None = None,
    tuning: TuningPlan | None = None,
) -> tuple[StepRunner, Callable[[], None]]:
    """The runner of an executor, and its warm-up. ``adapters`` is shared with ``LoadedAdapters``, which fills it.

    ``tuning`` is in place of what the settings say of it.
    """
    most = step_limits(limits)
    batch = PersistentBatch(most.max_num_seqs, most.max_blocks, num_groups)
    encoder = StepEncoder(batch, limits.block_size, vocab_size, exact_shape, adapters, settings.batch_invariant)
    runner = StepRunner(executor, encoder)
    if not executor.runs_ahead:
        return runner, partial(compute_padding, runner)
    has_graphs = not settings.enforce_eager
    graphs = GraphChoice(most.max_num_seqs, most.max_num_batched_tokens, adapters is not None, has_graphs)
    encoder.choose_shape = graphs.choose
    # The kernels of batch invariance are fixed: measurements must not decide on the order of sums.
    seconds = 0.0 if settings.batch_invariant else settings.kernel_tuning_seconds
    return runner, partial(_warm_up, graphs, runner, tuning or TuningPlan(seconds))


def _warm_up(graphs: GraphChoice, runner: StepRunner, tuning: TuningPlan) -> None:
    """Graphs keep the kernels with which they were captured, so kernels are chosen first."""
    tune_kernels(runner.send, tuning)
    graphs.warm_up(runner)


def step_limits(limits: memory.Limits) -> StepLimits:
    """Upper bounds of a step: sequences, tokens and blocks per sequence."""
    max_blocks = -(-limits.max_model_len // limits.block_size)
    return StepLimits(limits.max_num_seqs, limits.max_num_batched_tokens, max_blocks)


def _recorded(model: CausalLM, storage: KVStorage) -> Forward | None:
    """A forward pass that replays recorded kernel calls; ``None`` without compiled CPU kernels."""
    if ops.linear.chosen("cpu", torch.float32) == dispatch.REFERENCE:
        return None
    from octavo.runtime.recorded_forward import RecordedForward

    return RecordedForward(model, storage.layers)


def _kernel_compilation(form: WeightFormat, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
    """A context in which CPU kernels are compiled on two cores; no effect without kernels to compile."""
    if form.device.type != "cpu" or ops.attention.chosen("cpu", form.dtype) == dispatch.REFERENCE:
        return contextlib.nullcontext()
    from octavo.ops.cpu.attention import compiling_in_background

    return compiling_in_background(kv_dtype)


def _prepare(device: torch.device) -> None:
    """Prepare the device: set CPU thread counts, or load GPU kernels while the model is loaded."""
    if device.type == "cpu":
        _share_cores(default_num_threads())
    else:
        load_kernels()


def _share_cores(count: int) -> None:
    """Assign the cores to the threads of compiled kernels, if any: torch's spinning threads would occupy them."""
    if ops.linear.chosen("cpu", torch.float32) == dispatch.REFERENCE:
        torch.set_num_threads(count)
        return
    from octavo.ops.cpu import threads

    torch.set_num_threads(1)
    threads.set_num_threads(count)


def resolve_kv_dtype(name: str, form: WeightFormat, device: torch.device) -> torch.dtype:
    """The data type of cached keys and values; "auto" follows the weights. Raises ``ConfigError``."""
    if name == "fp8":
        if device.type == "cpu":
            raise ConfigError("kv_cache_dtype: fp8 is for GPUs; on a CPU use bfloat16 or float16")
        return torch.float8_e4m3fn
    return DTYPES.get(name, form.kv_dtype)


def resolve_device(name: str) -> torch.device:
    """The device of a setting; "auto" uses a GPU if there is one. Raises ``ConfigError``."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was requested, but torch finds no CUDA device")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def weight_format(settings: ModelSettings, device: torch.device, checkpoint: Checkpoint) -> WeightFormat:
    """The format of weights and activations.

    "auto" is float32 on a CPU; on a GPU it is float16 for a float16 checkpoint, else bfloat16. Quantised weights are
    kept packed if there is a kernel for them, which an explicit dtype on a CPU rules out.
    """
    if settings.dtype != "auto":
        return WeightFormat(DTYPES[settings.dtype], device, packs=device.type != "cpu")
    if device.type == "cpu":
        is_quantised = checkpoint.has_blocks or checkpoint.config.get("quantization_config") is not None
        return WeightFormat(torch.float32, device, packs=is_quantised and without_kernel("cpu") is None)
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return WeightFormat(torch.float16 if own == "float16" else torch.bfloat16, device, packs=True)
