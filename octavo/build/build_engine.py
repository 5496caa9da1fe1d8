"""Build an engine: what each setting means in objects, from the checkpoint to the step loop."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo import ops, plugins
from octavo.backend_settings import WITHOUT_MODEL
from octavo.build.build_drafter import NO_DRAFTER, DraftTarget, LoadedDrafter, find_drafter, load_drafter, make_proposer
from octavo.build.build_encoder import build_encoder, pooled_tasks
from octavo.build.build_executor import ExecutorParts, make_executor, make_storage, step_limits
from octavo.build.build_runner import make_grammars, make_runner
from octavo.build.build_vision import Vision, connected, load_vision
from octavo.build.device_settings import kernel_compilation, prepared_device, resolve_kv_dtype, weight_format
from octavo.cache.build_offload import content_fingerprint, default_room, make_offload
from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.config import CacheSettings, EngineConfig, ModelSettings, parse_lora_modules, to_flat
from octavo.engine.engine import Engine
from octavo.engine.protocols import EngineBackend
from octavo.engine.runner.adapter_numbers import LoadedAdapters
from octavo.engine.runner.expert_balance import BalancedRunner
from octavo.engine.runner.kernel_tuning import TuningPlan
from octavo.engine.runner.route_reading import RouteReading
from octavo.engine.runner.step_runner import BlockMessages, StepRunner, WeightMessages
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence_images import ImageSettings
from octavo.engine.speculative.draft_choice import DraftChoice
from octavo.engine.speculative.speculation import Speculation
from octavo.engine.timing.step_times import logged
from octavo.errors import ConfigError
from octavo.models.config_checks import check_dummy, check_sizes, eos_token_ids
from octavo.models.encoder import EncoderConfig
from octavo.models.meta_model import outline
from octavo.models.model_adapters import ModelAdapters, load_with_adapters
from octavo.models.model_config import ModelConfig
from octavo.models.multimodal_text import overridden_config
from octavo.models.pooling import Pooling, read_pooling
from octavo.models.registry import LoadedModel, read_config
from octavo.models.weight_updates import WeightUpdates
from octavo.ops import dispatch
from octavo.ops.collective import Collective
from octavo.ops.device_backend import Check, RankMemory, SharedMemory, backend_of, is_gpu
from octavo.plugins import CPU, GPU
from octavo.quant.stored.stored_weight import WeightFormat, dtype_name
from octavo.runtime import memory_budget
from octavo.runtime.drafting.optional_acceptance import Verify, rule
from octavo.runtime.executors.block_copies import pinned_memory
from octavo.runtime.executors.expert_moves import ExpertMoves
from octavo.runtime.executors.pooler import Pooler
from octavo.runtime.executors.routed_experts import keeping_routes
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.ranks.node_link import NodeListener, StartNode
from octavo.runtime.ranks.process_group import device_collective, visible_gpus
from octavo.runtime.ranks.rank_group import RankGroup
from octavo.runtime.ranks.rank_processes import RankProcesses
from octavo.runtime.ranks.ranks import OneRank, OnLost, Ranks, check_divides
from octavo.runtime.ranks.stage_link import StageLink
from octavo.runtime.ranks.start_messages import RankLayout
from octavo.runtime.weight_group import WeightGroup
from octavo.speculative_config import Method, parse_speculative_config
from octavo.steps.limits import RopeSets
from octavo.steps.messages import Executor
from octavo.system.background_threads import ThreadGroup
from octavo.telemetry.phases import Phases
from octavo.text.tokenizer import load_tokenizer
from octavo.types import EngineInfo
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.generation_config import check_token_ids, chosen_config, sampling_defaults
from octavo.weights.hub import resolve_model

PlaceHosts = Callable[[EngineConfig], contextlib.AbstractContextManager[tuple[EngineConfig, Check]]]
"""Starts the other hosts of an engine, which end with the block: gives the settings with which the first waits for
them, and what raises if one ends before it has joined. Raises ``ConfigError``."""
DEPTH = {CPU: 1, GPU: 2}
"""Steps in flight: on a GPU, the next step is scheduled while one is computed."""
logger = logging.getLogger(__name__)


class ModelBackend(Protocol):
    """Loads models that run in the executors of octavo; a module."""

    def read_model(self, config: EngineConfig, path: Path, form: WeightFormat) -> tuple[EngineConfig, ModelConfig]:
        """The settings as they apply to a model, and its configuration. Raises ``ConfigError``, ``CheckpointError``."""
        ...

    def describe(self, model: ModelConfig) -> Iterator[str]:
        """Lines about a model that ``read_model`` returned, for ``octavo models``."""
        ...

    def load_model(self, model: ModelConfig) -> LoadedModel:
        """The model of a configuration that ``read_model`` returned."""
        ...


def build_engine(
    config: EngineConfig,
    on_lost: OnLost | None = None,
    tuning: TuningPlan | None = None,
    started: RankProcesses | None = None,
    expects_grammars: bool = False,
) -> tuple[Engine, EngineInfo]:
    """Load the model and wire the engine; ``tuning``: see ``make_runner``. Raises ``ConfigError``, ``CheckpointError``.

    ``on_lost`` is called when another process that computes for it ends; steps then raise ``RanksLost`` or
    ``WorkerLost``. ``started``: of the other ranks. With ``expects_grammars`` the first finds the vocabulary loaded.
    """
    if config.model.backend in plugins.parts(plugins.ENGINE_BACKENDS) and config.model.backend not in WITHOUT_MODEL:
        backend: EngineBackend = plugins.load(plugins.ENGINE_BACKENDS, config.model.backend)
        return backend.build(config, on_lost)
    threads = ThreadGroup()
    try:
        with threads.starting():
            return _build(config, on_lost, tuning, started, expects_grammars, threads)
    except BaseException:
        threads.end()
        raise


def _build(
    config: EngineConfig,
    on_lost: OnLost | None,
    tuning: TuningPlan | None,
    started: RankProcesses | None,
    expects_grammars: bool,
    threads: ThreadGroup,
) -> tuple[Engine, EngineInfo]:
    phases = Phases()
    device, path, checkpoint = open_model(config.model)
    config, model_config, form = read_model(config, path, checkpoint, device)
    generation = read_generation(config.model, checkpoint, path, model_config)
    grammars = make_grammars(config.model, path, generation[0], expects_grammars)
    phases.done("device and checkpoint")
    if isinstance(model_config, EncoderConfig):
        return build_encoder(config, path, checkpoint, model_config, form)
    pooling = read_pooling(config.model.config_folder(path), config.model.pooling_type, is_encoder=False)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, form, model_config.cache)
    method = parse_speculative_config(config.speculative.speculative_config)
    found = find_drafter(method, config, model_config, checkpoint, device)
    with kernel_compilation(form, kv_dtype), _started_ranks(config, path, model_config, device, started) as ranks:
        collective, link = device_collective(ranks.collective, device), ranks.link(form.dtype, model_config.hidden_size)
        model_config, loaded, adapters = _load(config.model, model_config, checkpoint, form, collective, link)
        drafting = load_drafter(method, config, DraftTarget(loaded, model_config, form, collective), found)
        vision = load_vision(config, path, checkpoint, model_config, form)
        phases.done("weights")
        limits, budget = _settle(config, model_config, form, kv_dtype, loaded.bytes_by_format, ranks, drafting, vision)
        storage = make_storage(model_config, loaded, limits, config, form, collective, drafting.cache)
        drafter, vocab_size = drafting.start(storage), model_config.vocab_size
        most = step_limits(limits, model_config, method, drafter, vision)
        pool, images = connected(vision, loaded.model)
        updates = _updates(config, model_config, checkpoint, form, loaded, collective, vision, drafting)
        pooler, verify = _pooler(config, pooling, loaded, form), _rule(method)
        experts = _experts(config.model, loaded)
        parts = ExecutorParts(pooler, adapters, collective, drafter, verify, pool, updates, experts, link)
        executor = ranks.executor(make_executor(config.model, loaded.model, storage, vocab_size, most, parts))
        numbers = None if adapters is None else dict[str, int]()
        runner, warm_up = make_runner(
            config.model, executor, storage, vocab_size, most, numbers, tuning, images, threads
        )
        phases.done("memory")
        warm_up()
        phases.done("kernels and graphs")
    info = _info(model_config, loaded, form, limits, budget, config.model, *generation, images, updates, pooling)
    depth = _depth(config, device, limits, method)
    scheduler = _scheduler(config, limits, method, images, model_config.rope_sets, 1 if link is None else depth)
    lora = None if numbers is None else _load_adapters(config.model, runner, numbers)
    ranks.report_to(on_lost)
    timed, sleeper = logged(runner, config.scheduler.step_log), runner if info.sleeps_in_host_memory else None
    if expects_grammars:
        grammars.finish_loading()
        phases.done("vocabulary of grammars")
    balanced = timed if experts is None else BalancedRunner(timed, runner, scheduler.stats)
    weights = _connect_blocks(scheduler, config, runner, storage, path, form, info)  # last, as it may listen
    return Engine(scheduler, balanced, grammars, lora, sleeper, weights, depth, threads), info


def _depth(config: EngineConfig, device: torch.device, limits: memory_budget.Limits, method: Method | None) -> int:
    """Steps in flight: one for each stage of a single rank, but one if drafts can be rejected and there is recurrent
    state, as the next begins with it."""
    waits = limits.states is not None and method is not None
    num_stages = config.model.pipeline_parallel_size if config.model.tensor_parallel_size == 1 else 1
    return num_stages * DEPTH[device.type] if config.scheduler.async_scheduling and not waits else 1


def _info(
    model: ModelConfig,
    loaded: LoadedModel,
    form: WeightFormat,
    limits: memory_budget.Limits,
    budget: memory_budget.MemoryBudget,
    settings: ModelSettings,
    eos_token_ids: tuple[int, ...],
    defaults: dict[str, int | float],
    images: ImageSettings | None,
    updates: WeightUpdates | None,
    pooling: Pooling,
) -> EngineInfo:
    choices = dispatch.choices(form.device.type, form.dtype)
    tasks = pooled_tasks(pooling, model.labels, model.hidden_size)
    return EngineInfo(
        max_model_len=limits.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks,
        kv_groups=limits.kv_groups,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        architecture=model.architecture,
        num_parameters=loaded.num_parameters,
        dtype=dtype_name(form.dtype),
        device=str(form.device),
        memory=budget.as_dict(),
        weight_bytes=dict(loaded.bytes_by_format),
        kernels={choice.op: choice.kernel for choice in choices if choice.chosen},
        tasks=(*(("generate",) if model.has_head else ()), *tasks.names),
        embedding_size=tasks.embedding_size,
        pooling=tasks.meaning,
        sampling_defaults=defaults,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        sleeps_in_host_memory=is_gpu(form.device) and settings.num_ranks == 1,
        num_image_slots=0 if images is None else images.num_slots,
        max_logprobs=model.vocab_size if settings.max_logprobs < 0 else settings.max_logprobs,
        changes_weights=updates is not None,
        routes=model.routes,
    )


def build_rank(
    config: EngineConfig, ranks: RankMemory, check: Check, settle: Callable[[int], memory_budget.Limits]
) -> Executor:
    """Load the part of a rank but the first, and make its executor; errors as for ``build_engine``.

    ``check`` is called while it waits for other stages. ``settle`` is given the free bytes when the weights are loaded,
    and returns the limits for which to allocate memory.
    """
    device, path, checkpoint = open_model(config.model)
    config, model_config, form = read_model(config, path, checkpoint, device)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, form, model_config.cache)
    pooling = read_pooling(config.model.config_folder(path), config.model.pooling_type, is_encoder=False)
    method = parse_speculative_config(config.speculative.speculative_config)
    found = find_drafter(method, config, model_config, checkpoint, device)
    width = model_config.hidden_size
    link = StageLink(ranks, check, form.dtype, width) if ranks.num_stages > 1 else None
    model_config = _staged(model_config, link)
    with kernel_compilation(form, kv_dtype):
        collective = device_collective(ranks.within, device)
        loaded, adapters = load_with_adapters(config.model, model_config, checkpoint, form, collective)
        drafting = load_drafter(method, config, DraftTarget(loaded, model_config, form, collective), found)
        gc.collect()
        vision = load_vision(config, path, checkpoint, model_config, form)
        model_config = keeping_routes(model_config, loaded.model, config.model.enable_return_routed_experts)
        limits = settle(memory_budget.free_memory(device, config.cache.gpu_memory_utilization))
        storage = make_storage(model_config, loaded, limits, config, form, collective, drafting.cache)
        drafter, vocab_size = drafting.start(storage), model_config.vocab_size
        updates = _updates(config, model_config, checkpoint, form, loaded, collective, vision, drafting)
        pool = connected(vision, loaded.model)[0]
        most = step_limits(limits, model_config, method, drafter, vision)
        pooler, verify = _pooler(config, pooling, loaded, form), _rule(method)
        experts = _experts(config.model, loaded)
        parts = ExecutorParts(pooler, adapters, collective, drafter, verify, pool, updates, experts, link)
        return make_executor(config.model, loaded.model, storage, vocab_size, most, parts)


def _staged(model: ModelConfig, link: StageLink | None) -> ModelConfig:
    """The configuration of the layers that this process computes."""
    return model if link is None else dataclasses.replace(model, stage=link.stage)


def _experts(settings: ModelSettings, loaded: LoadedModel) -> ExpertMoves | None:
    """What moves experts between ranks, if anything does. Raises ``ConfigError``."""
    if not settings.enable_eplb or not loaded.mixtures:
        return None
    moves = ExpertMoves(loaded.mixtures)
    moves.check()
    return moves


@contextlib.contextmanager
def _started_ranks(
    config: EngineConfig, path: Path, model: ModelConfig, device: torch.device, started: RankProcesses | None
) -> Iterator[Ranks]:
    """The ranks of the engine, which are ended if this block fails. Raises ``ConfigError``."""
    size, num_stages, num_nodes = config.model.num_ranks, config.model.pipeline_parallel_size, config.model.nnodes
    if size == 1:
        yield OneRank()
        return
    if config.model.node_rank:
        raise ConfigError("node_rank: this host computes for that with node_rank 0; run `octavo serve --headless`")
    shared = rank_memory(config.model)
    check_divides(model, config.model, device)
    gpus = visible_gpus() if is_gpu(device) else []
    if 0 < len(gpus) < size:
        logger.warning("%d ranks share %d GPUs, which is slow: it is for tests", size, len(gpus))
    with contextlib.ExitStack() as ending:
        hosts = ending.enter_context(contextlib.ExitStack())
        config, check = _placed(config, hosts)
        nodes = NodeListener(config.model).wait(check) if num_nodes > 1 else []
        for link in nodes:
            ending.callback(link.close)
        layout = RankLayout(size, num_stages, num_nodes)
        processes = started or RankProcesses(len(layout.others))
        ending.callback(processes.end)
        flat = {**to_flat(config, EngineConfig), "model": str(path)}
        for link in nodes:
            link.tell(StartNode({**flat, "node_key": None}, content_fingerprint(path)))
        ranks = RankGroup(flat, processes, shared, layout, gpus, nodes)
        ending.callback(ranks.end)
        yield ranks
        weakref.finalize(ranks, hosts.pop_all().close)
        ending.pop_all()


def _placed(config: EngineConfig, hosts: contextlib.ExitStack) -> tuple[EngineConfig, Check]:
    """See ``PlaceHosts``; ``hosts`` ends them. Those of "mp" were started by others."""
    if config.model.distributed_executor_backend == "mp":
        return config, lambda: None
    place: PlaceHosts = plugins.load(plugins.STAGE_HOSTS, config.model.distributed_executor_backend)
    return hosts.enter_context(place(config))


def rank_memory(settings: ModelSettings) -> SharedMemory:
    """What makes the memory of ranks. Raises ``ConfigError`` if nothing does on this machine."""
    has_kernels = ops.linear.chosen(CPU, torch.float32) != dispatch.REFERENCE
    shared = backend_of(CPU).shared_memory() if has_kernels and hasattr(os, "memfd_create") else None
    if shared is None:
        name = "tensor_parallel_size" if settings.pipeline_parallel_size == 1 else "pipeline_parallel_size"
        raise ConfigError(f"{name}: more than 1 needs Linux and compiled CPU kernels, see `octavo doctor`")
    return shared


def _settle(
    config: EngineConfig,
    model: ModelConfig,
    form: WeightFormat,
    kv_dtype: torch.dtype,
    weights: Mapping[str, int],
    ranks: Ranks,
    drafting: LoadedDrafter,
    vision: Vision | None,
) -> tuple[memory_budget.Limits, memory_budget.MemoryBudget]:
    """The limits of all ranks, each of which has so many bytes of weights, and as many of a drafter."""
    gc.collect()
    free = ranks.least_free(memory_budget.free_memory(form.device, config.cache.gpu_memory_utilization))
    both = Counter(weights) + Counter({dtype_name(form.dtype): drafting.num_bytes})
    if vision is not None:
        both, free = both + vision.weight_bytes, free - vision.num_bytes
    limits, budget = memory_budget.plan_memory(
        config,
        model,
        kv_dtype=kv_dtype,
        dtype=form.dtype,
        device=form.device.type,
        weights=both,
        free=free,
        num_ranks=ranks.collective.size,
        draft_specs=drafting.cache,
    )
    logger.info("memory budget, with contexts of %d tokens:\n%s", limits.max_model_len, budget.table())
    ranks.settle(limits)
    return limits, budget


def read_generation(
    settings: ModelSettings, checkpoint: Checkpoint, path: Path, model: ModelConfig
) -> tuple[tuple[int, ...], dict[str, int | float]]:
    """The ids that end a text, and default sampling parameters. Raises ``ConfigError`` or ``CheckpointError``."""
    generation = chosen_config(settings.generation_config, checkpoint.generation_config, path)
    check_token_ids(checkpoint.config, generation, model.vocab_size)
    return eos_token_ids(model, generation), sampling_defaults(settings.generation_config, generation)


def _load_adapters(settings: ModelSettings, runner: StepRunner, numbers: dict[str, int]) -> LoadedAdapters:
    adapters = LoadedAdapters(runner, numbers, settings.max_loras)
    for name, folder in parse_lora_modules(settings.lora_modules).items():
        adapters.load(name, folder)
    return adapters


def _load(
    settings: ModelSettings,
    whole: ModelConfig,
    checkpoint: Checkpoint,
    form: WeightFormat,
    collective: Collective,
    link: StageLink | None,
) -> tuple[ModelConfig, LoadedModel, ModelAdapters | None]:
    model = _staged(whole, link)
    loaded, adapters = load_any(settings, model, checkpoint, form, collective)
    if link is not None:
        loaded = loaded._replace(num_parameters=outline(whole, checkpoint, form).num_parameters)
    return keeping_routes(model, loaded.model, settings.enable_return_routed_experts), loaded, adapters


def _connect_blocks(
    scheduler: Scheduler,
    config: EngineConfig,
    runner: StepRunner,
    storage: KVStorage,
    model: Path,
    form: WeightFormat,
    info: EngineInfo,
) -> WeightMessages | None:
    """Connect partial block reuse and KV offloading to the cache, and the reading of experts to the scheduler, if the
    settings enable them; return what changes the weights, and with them the identity of blocks, if anything does."""
    settings, forms, cache = config.cache, _forms(form, info, storage, config), scheduler.cache
    size = info.tensor_parallel_size
    blocks = BlockMessages(runner, storage.bytes_per_block * size, storage.bytes_per_state * size)
    if settings.enable_partial_reuse:
        cache.copy_slots = blocks.copy_slots
    if info.routes is not None:
        scheduler.routes = RouteReading(blocks.read_routes, info.routes, storage.block_size)
    if cache.states is not None:
        cache.states.copy = blocks.copy_state
    longest = min(info.num_kv_blocks, -(-info.max_model_len // storage.block_size))
    room = default_room(blocks, longest, memory_budget.free_memory(torch.device("cpu"), 1.0))
    if is_gpu(storage.device) and config.model.num_ranks == 1:
        blocks.allocate = pinned_memory
    if (offload := make_offload(settings, blocks, storage.block_size, model, forms, room)) is not None:
        cache.use_offload(offload)
    if not info.changes_weights:
        return None
    return WeightMessages(runner, model, forms, WeightGroup(storage.device), settings.role)


def read_model(
    config: EngineConfig, path: Path, checkpoint: Checkpoint, device: torch.device
) -> tuple[EngineConfig, ModelConfig, WeightFormat]:
    """See ``configured_model``; random weights that would not fit are refused."""
    config, model, form = configured_model(config, path, checkpoint, device)
    if checkpoint.is_dummy and model_backend(config.model) is None:
        free = memory_budget.free_memory(device, config.cache.gpu_memory_utilization)
        check_dummy(
            model, checkpoint, form, config.model.tensor_parallel_size, config.model.pipeline_parallel_size, free
        )
    return config, model, form


def configured_model(
    config: EngineConfig, path: Path, checkpoint: Checkpoint, device: torch.device
) -> tuple[EngineConfig, ModelConfig, WeightFormat]:
    """The settings as they apply to the model, its configuration, checked, and the format of its weights."""
    form = weight_format(config.model, device, checkpoint)
    if (backend := model_backend(config.model)) is not None:
        return *backend.read_model(config, path, form), form
    values = overridden_config(checkpoint.config, config.model.hf_overrides)
    if isinstance(words := values.get("classifier_from_token"), list):
        values["classifier_from_token"] = _token_ids(words, Path(config.model.tokenizer or path))
    model = read_config(values, config.model.max_model_len)
    check_sizes(model, checkpoint)
    return config, model, form


def _token_ids(words: list[Any], path: Path) -> list[Any]:
    """The ids of words that are one token each; what is no word stays. Raises ``ConfigError``."""
    tokenizer = load_tokenizer(path) if any(isinstance(word, str) for word in words) else None
    found: list[Any] = []
    for word in words:
        ids = tokenizer.encode(word, add_special_tokens=False) if tokenizer and isinstance(word, str) else [word]
        if len(ids) != 1 or isinstance(ids[0], str):
            raise ConfigError(f"classifier_from_token: {word!r} is no token of the model's tokenizer")
        found += ids
    return found


def model_backend(settings: ModelSettings) -> ModelBackend | None:
    """That of the settings; ``None`` for models of octavo's own."""
    if settings.backend not in plugins.parts(plugins.MODEL_BACKENDS):
        return None
    backend: ModelBackend = plugins.load(plugins.MODEL_BACKENDS, settings.backend)
    return backend


def load_any(
    settings: ModelSettings, model: ModelConfig, checkpoint: Checkpoint, form: WeightFormat, collective: Collective
) -> tuple[LoadedModel, ModelAdapters | None]:
    if (backend := model_backend(settings)) is not None:
        return backend.load_model(model), None
    return load_with_adapters(settings, model, checkpoint, form, collective)


def _updates(
    config: EngineConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    form: WeightFormat,
    loaded: LoadedModel,
    collective: Collective,
    vision: Vision | None,
    drafting: LoadedDrafter = NO_DRAFTER,
) -> WeightUpdates | None:
    """How the weights are changed while the engine lives; ``None`` if it must start again to have others."""
    if model.stage.count > 1:
        return None
    if loaded.kept is None or loaded.kept.has_constants or vision is not None or config.model.enable_eplb:
        return None  # experts that have moved are not where they were loaded
    return WeightUpdates(config.model, model, checkpoint, form, loaded, collective, drafting.update)


def _cache(settings: CacheSettings, limits: memory_budget.Limits) -> KVCache:
    groups = zip(limits.groups, limits.num_blocks, strict=True)
    return KVCache(
        [GroupSize(num_blocks, group.window) for group, num_blocks in groups],
        limits.block_size,
        settings.enable_prefix_caching,
        eviction=settings.eviction_policy,
        watermark=settings.kv_watermark,
        events=KVEvents() if settings.enable_kv_events else None,
        states=limits.states,
        num_ranks=limits.num_dp_ranks,
    )


def _forms(form: WeightFormat, info: EngineInfo, storage: KVStorage, config: EngineConfig) -> str:
    """What cached keys and values depend on besides the checkpoint, as a string that is equal in every process."""
    drafter = f"\n{config.speculative.speculative_config}" if storage.draft_layers else ""
    ranks = f" {info.tensor_parallel_size} ranks" if info.tensor_parallel_size > 1 else ""
    if config.model.decode_context_parallel_size > 1:
        ranks += f" of {config.model.decode_context_parallel_size} parts"
    scaled = " scaled" if storage.is_scaled else ""
    scaled += "" if storage.routes_NC is None else " with routes"
    weights = f"{form.dtype} {form.packs} {form.quantization} {form.quantizes_head}"
    if config.model.load_format == "dummy":
        weights += f" {config.model.seed}"
    overrides = f"\n{config.model.hf_overrides}" if config.model.hf_overrides else ""
    if config.model.hf_config_path is not None:
        read = config.model.config_folder(Path()) / "config.json"
        overrides += f"\n{hashlib.sha256(read.read_bytes()).hexdigest()}"
    kernels = {op: kernel for op, kernel in info.kernels.items() if not op.startswith("encoder_")}  # none computes keys
    return f"{weights} {kernels}\n{storage.dtype}{scaled}\n{storage.device.type}{ranks}{drafter}{overrides}"


def _scheduler(
    config: EngineConfig,
    limits: memory_budget.Limits,
    method: Method | None,
    images: ImageSettings | None,
    rope_sets: RopeSets | None,
    num_stages: int,
) -> Scheduler:
    return Scheduler(
        _cache(config.cache, limits),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        settings=config.scheduler,
        speculation=None if method is None else _speculation(method),
        images=images,
        rope_sets=rope_sets,
        num_stages=num_stages,
    )


def _rule(method: Method | None) -> Verify | None:
    if method is None:
        return None
    return rule(method.acceptance, method.synthetic_acceptance_length, method.num_speculative_tokens)


def _pooler(config: EngineConfig, pooling: Pooling, loaded: LoadedModel, form: WeightFormat) -> Pooler:
    return Pooler(pooling, loaded.labels, config.model.load_format, form)


def _speculation(method: Method) -> Speculation:
    most = method.num_speculative_tokens
    proposer = make_proposer(method)
    choice = DraftChoice(most, proposer.num_lookahead > 0) if method.adaptive else None
    return Speculation(proposer, most, choice)


def open_model(settings: ModelSettings) -> tuple[torch.device, Path, Checkpoint]:
    """The device, prepared, and the checkpoint in its folder."""
    device = prepared_device(settings)
    if settings.backend in WITHOUT_MODEL:
        raise ConfigError(f"backend: {settings.backend} is for `octavo serve`")
    path = resolve_model(settings)
    opened = open_checkpoint(path, settings.load_format, settings.seed, str(device), settings.hf_config_path)
    return device, path, opened
