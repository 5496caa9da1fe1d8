"""All settings: flags, ``OCTAVO_*`` variables, YAML files and ``LLM(...)`` read these classes.

Settings are grouped by owner and frozen. The metadata of a field holds its help text, choices and range,
so the command line and the documentation cannot drift from it. Names are vLLM's where vLLM has one.
``None`` or ``"auto"`` is resolved once, when the engine is built, from the model and the device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.backend_settings import BACKENDS, check_backend, is_honoured
from octavo.errors import ConfigError
from octavo.parallel_settings import ParallelSettings, check_parallel
from octavo.plugins import CPU, GPU
from octavo.sampling_params import parse_repetition_detection
from octavo.server_settings import ServerSettings
from octavo.setting import Setting, setting
from octavo.speculative_config import parse_speculative_config

DEFAULT_MODEL = "smollm2-135m"
STORED_METHODS = (
    *("auto-round", "awq", "bitnet", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "gguf"),
    *("gptq", "modelopt", "modelopt_fp4", "mxfp4"),
)
"""How checkpoints are quantised, as other servers want to be told: the setting accepts it, and must be right."""
DEFAULT_POLICY = "fcfs"
QUICK, FULL = "quick", "full"
"""Values of ``warmup``."""
POLICY_NAMES = (
    *("fcfs", "priority", "shortest-first", "longest-prefix"),
    *("deadline", "fair", "decode-round-robin", "static"),
)


def cache_dir() -> Path:
    """Folder of models and compiled kernels: ``$OCTAVO_CACHE_DIR``, else ``octavo`` in the user's cache folder."""
    own = os.environ.get("OCTAVO_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "octavo"
    return base.expanduser()


LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ParallelSettings):
    """The model and how to load it."""

    backend: str = setting(
        "octavo",
        "what computes: octavo's own models, any decoder of transformers, a worker in another process over gRPC, "
        "a toy or an instant answer without a model, or an upstream server with the OpenAI API",
        BACKENDS,
    )
    model: str = setting(
        DEFAULT_MODEL,
        "model folder, GGUF file, Hugging Face id, owner/name:Q4_K_M for a GGUF file there, or 'smollm2-135m'",
    )
    tokenizer: str | None = setting(None, "tokenizer folder or file; default: the model's own")
    chat_template: str | None = setting(None, "chat template file; default: the model's own")
    allow_special_tokens_in_messages: bool = setting(
        False,
        "recognise special tokens such as <|im_end|> in the texts of chat messages, tools and their results, too; "
        "default: there they are text, and only the chat template writes such tokens",
    )
    generation_config: str = setting(
        "auto",
        "default sampling parameters: auto reads the model's generation_config.json, vllm uses neutral values; "
        "or a folder that contains such a file",
    )
    hf_config_path: str | None = setting(
        None,
        "folder whose config.json and generation_config.json are used in place of the model's, which needs none; "
        "where that has no tokenizer either, give tokenizer, too",
    )
    load_format: str = setting(
        "auto",
        "checkpoint format; pt reads .bin and .pt files of PyTorch, tensors alone; dummy makes random weights",
        ("auto", "safetensors", "gguf", "pt", "dummy"),
    )
    dtype: str = setting(
        "auto",
        "data type of weights and activations; auto is the fastest that the checkpoint and the device support",
        ("auto", "float32", "bfloat16", "float16"),
        synonyms={"float": "float32", "half": "float16"},
    )
    quantization: str | None = setting(
        None,
        "quantise weights of 16 or 32 bits while they are loaded: fp8, int8, or int4 in groups of 128; "
        "a quantised checkpoint needs no setting",
        ("fp8", "int8", "int4"),
        synonyms={"awq_marlin": "awq", "gptq_marlin": "gptq", **{name: name for name in STORED_METHODS}},
    )
    quantize_lm_head: bool = setting(
        False,
        "quantise the map to logits to int8 while loading, and an embedding that is tied to it; quantised ones stay",
    )
    device: str = setting("auto", "device to run on", ("auto", CPU, GPU))
    enable_lora: bool = setting(False, "serve LoRA adapters; a request selects one by its model name")
    lora_modules: str | None = setting(
        None, "LoRA adapters to load at startup, such as 'sql=/adapters/sql,fr=/adapters/fr'"
    )
    max_loras: int = setting(64, "maximum loaded LoRA adapters; on a GPU their memory is reserved at startup", low=1)
    max_lora_rank: int = setting(16, "maximum rank of a LoRA adapter, on a GPU", low=1)
    merge_lora: bool = setting(False, "merge the single adapter of lora_modules into the weights, for all requests")
    language_model_only: bool = setting(
        False, "load no vision tower: a vision-language model then reads text alone, and needs less memory"
    )
    pooling_type: str = setting(
        "auto",
        "pooling of hidden states into an embedding; auto: from the checkpoint, else last for a decoder, mean for an "
        "encoder",
        ("auto", "mean", "last", "cls", "splade"),
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "what log-probabilities are of: the model's logits, or what tokens are sampled from, after penalties, masks, "
        "temperature and filters (of prompts: after the temperature); or these logits themselves",
        LOGPROBS_MODES,
    )
    max_logprobs: int = setting(
        20, "most tokens whose log-probabilities a request may ask for at each position; -1: all", low=-1
    )
    enable_return_routed_experts: bool = setting(
        False, "keep which experts of a mixture each token used, for requests that ask for it or give them"
    )
    batch_invariant: bool = setting(
        False, "on a GPU, make results bitwise independent of the rest of the batch; slower (a CPU always does)"
    )
    enforce_eager: bool = setting(
        False, "launch kernels one by one instead of replaying CUDA graphs on a GPU or recorded steps on a CPU"
    )
    kernel_tuning_seconds: float = setting(
        6.0,
        "seconds that a start may take, on a GPU, to measure kernels for matrix shapes that were not measured before; "
        "results are kept for later starts; 0: off",
        low=0,
    )
    warmup: str = setting(
        QUICK,
        "what a GPU waits for at a start: quick, kernels and graphs for a few step sizes, the others follow while it "
        "serves; or full, that all kernels are measured and compiled and all graphs captured",
        (QUICK, FULL),
    )
    kernel_cache: str | None = setting(
        None,
        "file of compiled kernels and measurements that octavo tune --export wrote; it is code, so it must be trusted. "
        "What it has for this GPU and these versions is not compiled again; default: a file that is installed for the "
        "GPU, if any",
    )
    max_model_len: int | None = setting(
        None, "maximum context length in tokens; default: the model's own, or what fits into memory", low=1
    )
    hf_overrides: str | None = setting(
        None,
        "JSON object whose members replace those of the checkpoint's config.json, such as "
        "'{\"max_position_embeddings\": 65536}' for a longer context",
        is_json=True,
    )
    seed: int = setting(0, "seed of dummy weights, and of LLM requests without a seed of their own", high=2**32 - 1)
    revision: str | None = setting(None, "branch, tag or commit of a Hugging Face model")
    offline: bool = setting(False, "fetch nothing: models must be on this machine; the same as HF_HUB_OFFLINE=1")
    download_dir: str | None = setting(None, "folder of downloaded models; default: the user's cache folder")
    grpc_worker: str | None = setting(None, "address HOST:PORT of the worker that computes, for backend grpc")
    grpc_ssl_ca_certs: str | None = setting(
        None, "file of CAs that verify the certificate of grpc_worker; default: no TLS, for a worker on this machine"
    )
    grpc_api_key: str | None = setting(
        None, "key that grpc_worker asks for; needed, with TLS, unless its address is a loopback address"
    )
    grpc_timeout: float = setting(
        30.0, "seconds that the worker of backend grpc may take for a step; then the engine connects again", low=0.001
    )

    def config_folder(self, model: Path) -> Path:
        """Where the configuration of the model at this path is read from."""
        return model if self.hf_config_path is None else Path(self.hf_config_path).expanduser()


ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The paged KV cache."""

    block_size: int | None = setting(
        None,
        "tokens per block, times decode_context_parallel_size; on a GPU a power of two of at least 16; default: by "
        "device",
        low=1,
    )
    num_kv_blocks: int | None = setting(None, "blocks in the pool; default: as many as fit into the memory", low=1)
    kv_cache_memory: float | None = setting(None, "GiB of memory for the KV cache; default: by device", low=0.001)
    kv_cache_dtype: str = setting(
        "auto",
        "data type of cached keys and values; fp8 is float8_e4m3fn, scaled where the checkpoint has scales; int8 and "
        "int4 have scales of each position and head",
        ("auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"),
        synonyms={"fp8_e4m3": "fp8", "int8_per_token_head": "int8", "int4_per_token_head": "int4"},
    )
    state_dtype: str = setting(
        "float32", "data type of recurrent states, for models that have any", ("float32", "bfloat16")
    )
    num_state_snapshots: int | None = setting(
        None,
        "recurrent states that the prefix cache keeps, for models that have any; default: as many as take the memory "
        "of keys and values",
        low=0,
    )
    gpu_memory_utilization: float = setting(0.9, "fraction of the GPU's memory to use, weights included", low=0.01)
    enable_prefix_caching: bool = setting(True, "reuse the blocks of equal prompt prefixes")
    enable_partial_reuse: bool = setting(
        True, "with prefix caching, copy the matching part of a cached block whose remaining tokens differ"
    )
    eviction_policy: str = setting(
        "lru", "which cached blocks are evicted first", ("lru", "fifo", "lfu", "slru", "session")
    )
    kv_watermark: float = setting(0.0, "fraction of the blocks that admission leaves free for running sequences", low=0)
    enable_kv_events: bool = setting(False, "publish at /v1/kv_events which blocks are cached, for routers")
    kv_offload_memory: float | None = setting(
        None,
        "GiB of host memory for evicted KV blocks; they are restored on a prefix match; default: with kv_offload_dir "
        "what the longest prompt takes, 1 at least, but at most an eighth of what is free, else none",
        low=0.001,
    )
    kv_offload_dir: str | None = setting(
        None, "folder that keeps the prefix cache over restarts, for all servers of this machine that share it"
    )
    kv_offload_disk: float | None = setting(None, "maximum GiB in kv_offload_dir; default: 32", low=0.001)
    role: str = setting(
        "both",
        "what this server computes of a request: both, or the prompt, whose KV blocks a decode server then fetches, or "
        "what follows a prompt that a prefill server has computed",
        ROLES,
    )
    kv_connector: str = setting(
        "tcp",
        "how KV blocks are sent from prefill to decode servers; nixl: read out of the other's memory over RDMA, shared "
        "memory or TCP, with the package nixl",
        ("tcp", "nixl"),
        synonyms={"NixlConnector": "nixl"},
    )
    kv_transfer_address: str = setting(
        "127.0.0.1:0", "address HOST:PORT at which a prefill server is asked for KV blocks; port 0 picks a free one"
    )
    kv_transfer_key: str | None = setting(None, "key that prefill and decode servers share, which others do not know")
    kv_transfer_ssl_certfile: str | None = setting(
        None, "certificate file of kv_transfer_address; default: no TLS, for decode servers on this machine"
    )
    kv_transfer_ssl_keyfile: str | None = setting(None, "file of its private key; default: kv_transfer_ssl_certfile")
    kv_transfer_ssl_ca_certs: str | None = setting(
        None, "file of CAs that verify prefill servers of other machines; default: those of this machine, without TLS"
    )
    kv_transfer_memory: float = setting(
        4.0,
        "GiB of host memory for KV blocks that a prefill server keeps, or that a decode server has fetched",
        low=0.001,
    )
    kv_transfer_ttl: float = setting(
        60.0, "seconds for which a prefill server keeps the KV blocks of a prompt that no one fetches", low=0.001
    )
    kv_transfer_timeout: float = setting(
        5.0, "seconds for which a prefill server may be silent until a decode server computes the prompt", low=0.001
    )

    @property
    def keeps_evicted(self) -> bool:
        """Whether evicted blocks go to slower tiers."""
        return self.kv_offload_memory is not None or self.kv_offload_dir is not None

    @property
    def has_tiers(self) -> bool:
        """Whether there are slower tiers, for blocks that were evicted or fetched."""
        return self.keeps_evicted or self.role != "both"


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Batching, order of service and preemption."""

    max_num_seqs: int | None = setting(None, "maximum sequences in a step; default: by device", low=1, high=65_536)
    max_num_batched_tokens: int | None = setting(
        None, "token budget of a step; longer prompts are computed in chunks; default: by device", low=1
    )
    scheduling_policy: str | None = setting(
        None, "order in which requests are served; default: fair with api_key_file, else fcfs", POLICY_NAMES
    )
    policy_ageing: float | None = setting(
        None,
        "seconds of waiting that offset one priority level, or 1,000 prompt tokens, or 1,000 cached tokens; "
        "default: 30",
        low=0.001,
    )
    ttft_target: float | None = setting(
        None, "target time to first token of the deadline policy, in seconds; default: 1", low=0.001
    )
    tpot_target: float | None = setting(
        None, "target mean time per output token of the deadline policy, in seconds; default: none", low=0.0001
    )
    tenant_weights: str | None = setting(
        None, "weights of tenants under the fair policy, such as 'a=2,b=0.5'; default: 1 each"
    )
    turn_tokens: int | None = setting(
        None, "output tokens per turn under the decode-round-robin policy; default: 64", low=1
    )
    preemption_victim: str = setting(
        "auto",
        "which sequence is preempted when blocks run out; auto is the policy's own choice",
        ("auto", "youngest", "cheapest", "largest"),
    )
    async_scheduling: bool = setting(True, "on a GPU, schedule and launch the next step while one is computed")
    max_itl: float | None = setting(
        None, "maximum inter-token latency in seconds: prefill chunks are cut so that steps stay below it", low=0.0001
    )
    step_log: str | None = setting(
        None, "file to append each step's work and duration to, for `octavo simulate --cost-log`"
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeSettings:
    """Speculative decoding: drafts are verified in one step and leave the output unchanged."""

    speculative_config: str | None = setting(
        None,
        'source of drafts, as JSON: {"method": "ngram", "num_speculative_tokens": 4}, or method suffix, draft_model, '
        'eagle3, mtp or dflash, with "model": the drafter\'s checkpoint; default: off',
        is_json=True,
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the engine; ``LLM`` takes them as one flat set of names."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from flat names such as ``{"model": ..., "max_num_seqs": 8}``; unknown names raise ``ConfigError``."""
        return _from_flat(cls, values)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Settings of ``octavo serve``: the engine's and the server's."""

    server: ServerSettings = field(default_factory=ServerSettings)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> ServeConfig:
        return typing.cast(ServeConfig, _from_flat(cls, values))


def settings(config_class: type[EngineConfig]) -> tuple[Setting, ...]:
    """Every setting of a config class, in the order of its groups."""
    return _settings(typing.cast(Any, config_class))  # of classes of dataclasses, mypy knows no hash


@functools.cache
def _settings(config_class: type[EngineConfig]) -> tuple[Setting, ...]:
    found = []
    hints = typing.get_type_hints(config_class)
    for group in dataclasses.fields(config_class):
        owner = hints[group.name]
        owner_hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            kind = owner_hints[item.name]
            optional = isinstance(kind, types.UnionType)
            base = next(t for t in typing.get_args(kind) if t is not types.NoneType) if optional else kind
            details = (item.metadata[key] for key in ("help", "choices", "low", "high", "is_json", "synonyms"))
            found.append(Setting(item.name, group.name, base, optional, item.default, *details))
    return tuple(found)


def _from_flat(config_class: type[EngineConfig], values: Mapping[str, Any]) -> EngineConfig:
    known = {item.name: item for item in settings(config_class)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        groups.setdefault(known[name].group, {})[name] = known[name].parse(value)
    hints = typing.get_type_hints(config_class)
    config = config_class(**{group: hints[group](**chosen) for group, chosen in groups.items()})
    check_backend(config.model.backend, _changed(config))
    if isinstance(config, ServeConfig) and config.server.api_key_file is not None:
        config = _with_fair_shares(config)
    _check_combinations(config)
    return config


def _with_fair_shares(config: ServeConfig) -> ServeConfig:
    """The settings of a server of several API keys, whose policy is fair if none is given and the backend has any."""
    scheduler = config.scheduler
    if scheduler.scheduling_policy is not None or not is_honoured(config.model.backend, "scheduling_policy"):
        return config
    return dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, scheduling_policy="fair"))


def _check_combinations(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for combinations that are invalid for every model and device."""
    cache, scheduler = config.cache, config.scheduler
    if cache.num_kv_blocks is not None and cache.kv_cache_memory is not None:
        raise ConfigError("num_kv_blocks and kv_cache_memory both size the KV cache; give one of them")
    if cache.gpu_memory_utilization > 1:
        raise ConfigError("gpu_memory_utilization: must be at most 1")
    if (
        scheduler.max_num_seqs is not None
        and scheduler.max_num_batched_tokens is not None
        and scheduler.max_num_batched_tokens < scheduler.max_num_seqs
    ):
        raise ConfigError(
            "max_num_batched_tokens must be at least max_num_seqs, so that every sequence can advance in a step"
        )
    if cache.kv_watermark >= 1:
        raise ConfigError("kv_watermark: must be below 1")
    if not cache.enable_prefix_caching and (cache.eviction_policy != "lru" or cache.enable_kv_events):
        raise ConfigError("eviction_policy and enable_kv_events need enable_prefix_caching")
    _check_quantization(config.model)
    check_parallel(config.model)
    if config.model.decode_context_parallel_size > 1 and config.model.enable_return_routed_experts:
        raise ConfigError(
            "decode_context_parallel_size and enable_return_routed_experts: blocks with a part of each context do not "
            "keep what routers select"
        )
    _check_apart(config.model, cache)
    _check_offload(config.model, cache)
    _check_role(config.model, cache)
    if isinstance(config, ServeConfig) and config.server.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config.server, name) is not None:
                raise ConfigError(f"{name} needs ssl_certfile: without a certificate, there is no HTTPS")
    if isinstance(config, ServeConfig):
        _check_headless(config)
    if isinstance(config, ServeConfig):
        _check_kv_events(config.server, cache)
    if isinstance(config, ServeConfig):
        _check_tenants(config.server, config.model)
        parse_repetition_detection(config.server.repetition_detection)
    _check_policy(scheduler, cache)
    parse_speculative_config(config.speculative.speculative_config)
    parse_hf_overrides(config.model.hf_overrides)


def parse_hf_overrides(text: str | None) -> dict[str, Any]:
    """The members that replace those of a checkpoint's configuration. Raises ``ConfigError``."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"hf_overrides: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("hf_overrides: must be a JSON object")
    return value


def _check_quantization(model: ModelSettings) -> None:
    if model.quantization is not None and model.merge_lora:
        raise ConfigError(
            "quantization and merge_lora: adapters cannot be merged into quantised weights; use enable_lora"
        )


def _check_apart(model: ModelSettings, cache: CacheSettings) -> None:
    """What does not go with processes of which each has some layers, or some sequences, alone."""
    others = "enable_lora", "merge_lora", "enable_return_routed_experts"
    for of_each, names in (
        ("pipeline_parallel_size", (*others, "enable_eplb")),
        ("enable_dp_attention", (*others, "decode_context_parallel_size", "pipeline_parallel_size")),
    ):
        if getattr(model, of_each) == getattr(ModelSettings, of_each):
            continue
        for name in names:
            if getattr(model, name) != getattr(ModelSettings, name):
                raise ConfigError(f"{of_each} and {name}: a process would need what only others have")
        if cache.has_tiers:
            name = "role" if cache.role != "both" else "kv_offload_memory and kv_offload_dir"
            raise ConfigError(f"{of_each} and {name}: blocks of several processes are not stored together")


def _check_headless(config: ServeConfig) -> None:
    rank, server = config.model.node_rank, config.server
    if server.headless and not rank:
        raise ConfigError("headless needs node_rank, from 1 on: the host with node_rank 0 serves HTTP")
    if rank and not server.headless:
        raise ConfigError(f"node_rank: {rank} needs headless: the host with node_rank 0 serves HTTP")
    if config.model.nnodes > 1 and server.data_parallel_size > 1:
        raise ConfigError("nnodes and data_parallel_size: each engine would need hosts of its own")
    if config.model.nnodes > 1 and server.takeover_socket is not None:
        raise ConfigError("nnodes and takeover_socket: the other hosts compute for the server before until it ends")


def _changed(config: EngineConfig) -> dict[str, str]:
    """The settings that differ from their defaults, with their groups."""
    return {
        item.name: item.group
        for item in settings(type(config))
        if getattr(getattr(config, item.group), item.name) != item.default
    }


def _check_kv_events(server: ServerSettings, cache: CacheSettings) -> None:
    if server.kv_events_config is not None and not cache.enable_prefix_caching:
        raise ConfigError("kv_events_config needs enable_prefix_caching")
    for name, is_on in (
        ("enable_kv_events", cache.enable_kv_events),
        ("kv_events_config", server.kv_events_config is not None),
    ):
        if server.isolate_keys and is_on:
            raise ConfigError(f"isolate_keys and {name}: the events would show prompts of other keys")


def _check_tenants(server: ServerSettings, model: ModelSettings) -> None:
    if server.tenant_by not in (None, "user") and server.tenant_header is not None:
        raise ConfigError("tenant_by and tenant_header both identify the tenant; give one of them")
    if server.tenant_by == "key" and server.api_key_file is None:
        raise ConfigError("tenant_by key needs api_key_file: without it, all clients share one key")
    if server.isolate_keys and server.api_key_file is None:
        raise ConfigError("isolate_keys needs api_key_file: without it, all clients share one key")
    if server.tenant_by == "adapter" and not model.enable_lora:
        raise ConfigError("tenant_by adapter needs enable_lora")


def _check_offload(model: ModelSettings, cache: CacheSettings) -> None:
    if cache.keeps_evicted and not cache.enable_prefix_caching:
        raise ConfigError("kv_offload_memory and kv_offload_dir need enable_prefix_caching: they hold cached prefixes")
    if cache.kv_offload_disk is not None and cache.kv_offload_dir is None:
        raise ConfigError("kv_offload_disk needs kv_offload_dir")
    if cache.kv_offload_dir is not None and model.merge_lora:
        raise ConfigError("kv_offload_dir and merge_lora: files are named by the checkpoint, which merging changes")


def _check_role(model: ModelSettings, cache: CacheSettings) -> None:
    given = [item.name for item in dataclasses.fields(cache) if item.name.startswith(("kv_transfer_", "kv_connector"))]
    if cache.role == "both":
        if changed := [name for name in given if getattr(cache, name) != getattr(CacheSettings, name)]:
            raise ConfigError(f"{changed[0]} needs role prefill or decode")
        return
    if not cache.kv_transfer_key:
        raise ConfigError(f"role {cache.role} needs kv_transfer_key, which prefill and decode servers share")
    if not cache.enable_prefix_caching:
        raise ConfigError(f"role {cache.role} needs enable_prefix_caching: what is fetched is a cached prefix")
    if model.merge_lora:
        raise ConfigError("role and merge_lora: KV blocks are named by the checkpoint, which merging changes")


OWNERS = {
    "policy_ageing": ("priority", "shortest-first", "longest-prefix"),
    "ttft_target": ("deadline",),
    "tpot_target": ("deadline",),
    "tenant_weights": ("fair",),
    "turn_tokens": ("decode-round-robin",),
}
"""Settings that apply to some policies only."""


def _check_policy(scheduler: SchedulerSettings, cache: CacheSettings) -> None:
    policy = scheduler.scheduling_policy or DEFAULT_POLICY
    for name, policies in OWNERS.items():
        if getattr(scheduler, name) is not None and policy not in policies:
            raise ConfigError(f"{name} needs scheduling_policy {' or '.join(policies)}; it is {policy}")
    if policy == "longest-prefix" and not cache.enable_prefix_caching:
        raise ConfigError("scheduling_policy longest-prefix needs enable_prefix_caching: it sorts by cached tokens")


def parse_lora_modules(text: str | None) -> dict[str, str]:
    """Adapter names and their folders, from ``NAME=PATH,NAME=PATH``. Raises ``ConfigError``."""
    modules: dict[str, str] = {}
    for part in (text or "").split(",") if text else ():
        name, is_pair, path = (piece.strip() for piece in part.partition("="))
        if not (name and is_pair and path) or name in modules:
            raise ConfigError(f"lora_modules: {part!r} is not NAME=PATH with a unique name")
        modules[name] = path
    return modules


def to_flat(config: EngineConfig, config_class: type[EngineConfig] | None = None) -> dict[str, Any]:
    """The inverse of ``from_flat``: flat names to values, ready for JSON; limited to the groups of ``config_class``."""
    return {
        name: value
        for group in dataclasses.fields(config_class or config)
        for name, value in dataclasses.asdict(getattr(config, group.name)).items()
    }
