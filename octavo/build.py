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
from octavo.build_drafter import Target, load_drafter, make_proposer
from octavo.build_encoder import build_encoder
from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.cache.offloading import make_offload
from octavo.config import CacheSettings, EngineConfig, ModelSettings, parse_lora_modules
from octavo.engine.adapters import LoadedAdapters
from octavo.engine.draft_choice import DraftChoice
from octavo.engine.engine import Engine
from octavo.engine.graph_choice import GraphChoice
from octavo.engine.mixed_steps import settle_mixed_steps
from octavo.engine.persistent_batch import PersistentBatch
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculation import Speculation
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
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.pooling import Pooling, read_pooling
from octavo.models.registry import CausalLM, read_config
from octavo.models.sizes import check_dummy, check_sizes, eos_token_ids
from octavo.ops import dispatch
from octavo.quant.blocks import without_kernel
from octavo.quant.stored import WeightFormat
from octavo.runtime import memory
from octavo.runtime.acceptance import Verify, rule
from octavo.runtime.cpu_threads import num_threads_wanted
from octavo.runtime.device_program import load_kernels
from octavo.runtime.drafter import Drafter
from octavo.runtime.forward import make_forward
from octavo.runtime.host_executor import LAST_TOKEN, HostExecutor
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.stream_executor import StreamExecutor
from octavo.speculative_config import Method, parse_speculative_config
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
"""Steps in flight: on a GPU, the next step is scheduled while one is computed."""
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
    with _kernel_compilation(form, kv_dtype):
        loaded, adapters = load_with_adapters(config.model, model_config, checkpoint, form)
        method = parse_speculative_config(config.speculative.speculative_config)
        form_of = partial(weight_format, config.model, device)
        drafting = load_drafter(method, config, Target(loaded, model_config, checkpoint, form, form_of))
        gc.collect()
        phases.done("weights")
        free = memory.free_memory(device, config.cache.gpu_memory_utilization)
        kinds = kv_dtype, form.dtype, device.type
        num_bytes, draft_specs = loaded.num_bytes, tuple[LayerCacheSpec, ...]()
        if drafting is not None:
            num_bytes, draft_specs = num_bytes + drafting.num_bytes, drafting.cache
        limits, budget = memory.settle(config, model_config, *kinds, num_bytes, free, draft_specs)
        specs = (*model_config.cache, *draft_specs)
        sizes = limits.groups, limits.num_blocks, limits.block_size
        storage = KVStorage(specs, *sizes, kv_dtype, device, len(draft_specs))
        vocab_size = model_config.vocab_size
        drafter = None if drafting is None else drafting.start(storage)
        most = step_limits(limits, 0 if method is None else method.num_speculative_tokens, drafter)
        drafting_rule = _rule(method)
        executor = make_executor(
            config.model, loaded.model, storage, vocab_size, most, pooling, adapters, drafter, drafting_rule
        )
        numbers = None if adapters is None else dict[str, int]()
        runner, warm_up = make_runner(config.model, executor, storage, vocab_size, most, numbers)
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
    scheduler = _scheduler(config, limits, 0 if device.type == "cpu" else num_bytes, method)
    _connect_blocks(scheduler.cache, config.cache, runner, storage, path, _forms(form, info, storage))
    lora = None if numbers is None else _load_adapters(config.model, runner, numbers)
    depth = DEPTH[device.type] if config.scheduler.async_scheduling else 1
    timed = logged(runner, config.scheduler.step_log)
    return Engine(scheduler, timed, grammars=grammars, adapters=lora, depth=depth), info


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


def _scheduler(config: EngineConfig, limits: memory.Limits, bytes_on_gpu: int, method: Method | None) -> Scheduler:
    return Scheduler(
        _cache(config.cache, limits),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        settings=settle_mixed_steps(config.scheduler, bytes_on_gpu),
        speculation=None if method is None else _speculation(method),
    )


def _rule(method: Method | None) -> Verify | None:
    if method is None:
        return None
    return rule(method.acceptance, method.synthetic_acceptance_length, method.num_speculative_tokens)


def _speculation(method: Method) -> Speculation:
    most = method.num_speculative_tokens
    return Speculation(make_proposer(method), most, DraftChoice(most) if method.adaptive else None)


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
    most: StepLimits,
    pooling: Pooling = LAST_TOKEN,
    adapters: Adapters | None = None,
    drafter: Drafter | None = None,
    verify: Verify | None = None,
) -> Executor:
    """The executor for the storage's device. Results on a CPU never depend on the batch."""
    if storage.device.type == "cpu":
        forward = make_forward(model, storage.layers, storage.device, settings.enforce_eager)
        return HostExecutor(model, storage, vocab_size, most, forward, pooling, adapters, drafter, verify)
    return StreamExecutor(
        model,
        storage,
        vocab_size,
        most,
        settings.batch_invariant,
        settings.enforce_eager,
        pooling,
        adapters,
        drafter,
        verify,
    )


def make_runner(
    settings: ModelSettings,
    executor: Executor,
    storage: KVStorage,
    vocab_size: int,
    most: StepLimits,
    adapters: dict[str, int] | None = None,
) -> tuple[StepRunner, Callable[[], None]]:
    """The runner of an executor, and its warm-up. ``adapters`` is shared with ``LoadedAdapters``, which fills it."""
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
    return runner, partial(graphs.warm_up, runner)


def step_limits(limits: memory.Limits, max_drafts: int = 0, drafter: Drafter | None = None) -> StepLimits:
    """Upper bounds of a step: sequences, tokens, and blocks and drafts per sequence."""
    max_blocks = -(-limits.max_model_len // limits.block_size)
    num_drafts = 0 if drafter is None else drafter.num_drafts
    return StepLimits(limits.max_num_seqs, limits.max_num_batched_tokens, max_blocks, max_drafts, num_drafts)


def _kernel_compilation(form: WeightFormat, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
    """A context in which CPU kernels are compiled on two cores; no effect without kernels to compile."""
    if form.device.type != "cpu" or ops.attention.chosen("cpu", form.dtype) == dispatch.REFERENCE:
        return contextlib.nullcontext()
    from octavo.ops.cpu.attention import compiling_beside

    return compiling_beside(kv_dtype)


def _prepare(device: torch.device) -> None:
    """Prepare the device: set CPU thread counts, or load GPU kernels while the model is loaded."""
    if device.type == "cpu":
        _share_cores(num_threads_wanted())
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

    An explicit dtype converts every weight to dense tensors of that type. "auto" is float32 on a CPU, with
    block-quantized weights kept packed if there is a kernel for them; on a GPU it is float16 for a float16 checkpoint,
    else bfloat16.
    """
    if settings.dtype != "auto":
        return WeightFormat(DTYPES[settings.dtype], device)
    if device.type == "cpu":
        return WeightFormat(torch.float32, device, packs=checkpoint.has_blocks and without_kernel("cpu") is None)
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return WeightFormat(torch.float16 if own == "float16" else torch.bfloat16, device)
