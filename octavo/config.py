"""Every setting, once: flags, ``OCTAVO_*`` variables, YAML files and ``LLM(...)`` all read these classes.

Settings are grouped by who owns them and frozen. A field says its own help, choices and unit in its metadata,
so that the command line and the documentation cannot drift from it. Names are vLLM's where vLLM has one.
``None`` or ``"auto"`` is settled once, when the engine is built, from the model and the device.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.setting import Setting, setting
from octavo.speculative_config import parse_speculative_config

DEFAULT_MODEL = "smollm2-135m"
POLICY_NAMES = (
    *("fcfs", "priority", "shortest-first", "longest-prefix"),
    *("deadline", "fair", "decode-round-robin", "static"),
)


def cache_dir() -> Path:
    """Where models and compiled kernels are kept: ``$OCTAVO_CACHE_DIR``, else ``octavo`` in the user's cache folder."""
    own = os.environ.get("OCTAVO_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "octavo"
    return base.expanduser()


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and how to load it."""

    model: str = setting(DEFAULT_MODEL, "folder, GGUF file, Hugging Face id, or 'smollm2-135m'")
    tokenizer: str | None = setting(None, "folder or file of the tokenizer, when not the model's own")
    chat_template: str | None = setting(None, "file with a chat template, when not the model's own")
    generation_config: str = setting(
        "auto",
        "how to sample where a request does not say: auto is as the model's generation_config.json says, "
        "vllm is neutral; or a folder with such a file",
    )
    load_format: str = setting(
        "auto", "checkpoint form; dummy makes random weights", ("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = setting(
        "auto",
        "arithmetic of the model; auto is the fastest that the checkpoint and the device suit",
        ("auto", "float32", "bfloat16", "float16"),
    )
    device: str = setting("auto", "where to run", ("auto", "cpu", "cuda"))
    enable_lora: bool = setting(False, "take LoRA adapters beside the model's weights, chosen by the model's name")
    lora_modules: str | None = setting(
        None, "adapters to load at the start, such as 'sql=/adapters/sql,fr=/adapters/fr'"
    )
    max_loras: int = setting(64, "most adapters that are loaded at once; on a GPU their memory is set aside", low=1)
    max_lora_rank: int = setting(16, "on a GPU, the highest rank of an adapter", low=1)
    merge_lora: bool = setting(False, "add the one adapter of lora_modules to the weights, for all requests")
    pooling_type: str = setting(
        "auto",
        "how tokens' vectors become a text's; auto: as the checkpoint says, else the last of a decoder, the mean of an "
        "encoder",
        ("auto", "mean", "last", "cls"),
    )
    batch_invariant: bool = setting(
        False, "on a GPU, let no token depend on what else is in its batch, to the bit; slower (a CPU always does)"
    )
    enforce_eager: bool = setting(
        False, "launch every kernel by itself instead of replaying CUDA graphs on a GPU, recorded steps on a CPU"
    )
    max_model_len: int | None = setting(None, "longest context in tokens; default: the model's own", low=1)
    seed: int = setting(0, "seed of dummy weights, and of what LLM generates without one")
    revision: str | None = setting(None, "branch, tag or commit of a Hugging Face id")
    download_dir: str | None = setting(None, "where fetched models are kept; default: the user's cache folder")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The paged KV cache."""

    block_size: int | None = setting(None, "tokens in a block; default: by device", low=1)
    num_kv_blocks: int | None = setting(None, "blocks in the pool; default: as many as the memory takes", low=1)
    kv_cache_memory: float | None = setting(None, "GiB of memory for the KV cache; default: by device", low=0.001)
    kv_cache_dtype: str = setting(
        "auto",
        "type of cached keys and values; fp8 is float8_e4m3fn without scales, on a GPU",
        ("auto", "float32", "bfloat16", "float16", "fp8"),
    )
    gpu_memory_utilization: float = setting(0.9, "share of a GPU's memory to use in all", low=0.01)
    enable_prefix_caching: bool = setting(True, "share the blocks of equal prompt prefixes")
    enable_partial_reuse: bool = setting(
        True, "with prefix caching, where a prompt begins like a cached block and goes on otherwise, copy that part"
    )
    eviction_policy: str = setting(
        "lru", "which cached blocks are given up first", ("lru", "fifo", "lfu", "slru", "session")
    )
    kv_watermark: float = setting(0.0, "share of the blocks that admission leaves to those who run", low=0)
    enable_kv_events: bool = setting(False, "tell routers at /v1/kv_events which blocks are cached")
    kv_offload_memory: float | None = setting(
        None, "GiB of host memory for blocks that the KV cache gives up; they come back when asked for", low=0.001
    )
    kv_offload_dir: str | None = setting(None, "folder for blocks that this memory gives up; found after a restart")
    kv_offload_disk: float | None = setting(None, "most GiB in this folder; default: 32", low=0.001)


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """What runs next."""

    max_num_seqs: int | None = setting(None, "most sequences in one step; default: by device", low=1)
    max_num_batched_tokens: int | None = setting(
        None, "most tokens computed in one step; longer prompts are computed in chunks", low=1
    )
    max_num_mixed_tokens: int | None = setting(
        None,
        "most tokens computed in a step beside a few who decode; default: 384 for large models on a GPU, else no other",
        low=1,
    )
    scheduling_policy: str = setting("fcfs", "who is served first", POLICY_NAMES)
    policy_ageing: float | None = setting(
        None,
        "seconds of waiting that outweigh one level of priority, or 1,000 tokens of a prompt or found in the cache; "
        "default: 30",
        low=0.001,
    )
    ttft_target: float | None = setting(
        None, "seconds to the first token that the deadline policy aims at; default: 1", low=0.001
    )
    tpot_target: float | None = setting(
        None, "seconds for each token after it, on average, that the deadline policy aims at; default: none", low=0.0001
    )
    tenant_weights: str | None = setting(
        None, "shares of tenants under the fair policy, such as 'a=2,b=0.5'; default: 1 each"
    )
    turn_tokens: int | None = setting(
        None, "output tokens of a turn, under the policy that gives everybody turns; default: 64", low=1
    )
    preemption_victim: str = setting(
        "auto",
        "who gives back its blocks when they run out; auto is the policy's own choice",
        ("auto", "youngest", "cheapest", "largest"),
    )
    decode_interval: int | None = setting(
        None,
        "while prompts can be computed, let those who decode have a token in one of so many steps only; default: 1",
        low=1,
    )
    async_scheduling: bool = setting(
        True, "on a GPU, decide and start the next step while it computes this one; guesses exclude it, and go before"
    )
    max_itl: float | None = setting(
        None, "seconds between two tokens that no prompt of somebody else may exceed: prompts are sliced", low=0.0001
    )
    step_log: str | None = setting(
        None, "file to which each step's work and seconds are added, for `octavo simulate --cost-log`"
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeSettings:
    """Guesses at the next tokens, which change no token: the model looks at several in one step."""

    speculative_config: str | None = setting(
        None,
        'how to guess, as JSON: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, '
        '"prompt_lookup_min": 2} takes what followed the last tokens where they stood before; default: no guesses',
        is_json=True,
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    served_model_name: str | None = setting(None, "names of the model in the API, with commas; default: from the model")
    api_key: str | None = setting(None, "key that clients must send as a Bearer token; default: none asked")
    api_key_file: str | None = setting(
        None, "file of keys, one a line: a name, the key's SHA-256, requests_per_minute=, tokens_per_minute=, admin"
    )
    admin_key: str | None = setting(None, "key of /admin, and with several keys of /metrics and /stats; default: none")
    allowed_hosts: str | None = setting(
        None,
        "names of this server, with commas, that clients may connect to, or *; default: those of the machine itself "
        "when only it can connect, else any",
    )
    allowed_origins: str | None = setting(
        None, "origins, with commas, of web pages that may use this server (CORS), or *; default: none"
    )
    ssl_certfile: str | None = setting(None, "file with the certificate, to serve HTTPS")
    ssl_keyfile: str | None = setting(None, "file with the certificate's key, when not in its own file")
    ssl_ca_certs: str | None = setting(None, "file with authorities, one of which every client's certificate needs")
    max_num_queued_reqs: int = setting(256, "most requests waiting; one more gets 429", low=1)
    max_request_bytes: int = setting(32 << 20, "most bytes in a request's body", low=1024)
    tool_call_parser: str = setting(
        "auto",
        "how the model writes calls of functions; auto: as its chat template shows, else hermes, told in text",
        ("auto", "none", "hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "openai", "pythonic"),
    )
    enable_auto_tool_choice: bool = setting(True, "let clients offer tools that the model may call or not")
    reasoning_parser: str = setting(
        "auto",
        "how the model writes its reasoning; auto: as its chat template shows",
        ("auto", "none", "deepseek_r1", "qwen3", "openai_gptoss"),
    )
    allow_runtime_lora_updating: bool = setting(
        False, "let clients load LoRA adapters from folders of this machine, and unload them"
    )
    unknown_fields: str = setting(
        "warn",
        "what to do with a field that is passed over: serve and name it in a header, refuse, or say nothing",
        ("warn", "reject", "ignore"),
    )
    isolate_keys: bool = setting(False, "share cached prompts only among requests of one API key, never between keys")
    tenant_by: str = setting(
        "user",
        "who is charged under the fair policy: the body's field 'user', the API key, or the adapter that is asked for",
        ("user", "key", "adapter"),
    )
    tenant_header: str | None = setting(None, "header that names who is charged, in place of the field 'user'")
    state_dir: str | None = setting(
        None, "folder of what is kept for clients: responses, files, batches; default: memory, until the server ends"
    )
    retention_hours: float = setting(720.0, "hours after which what is kept for clients is forgotten", low=0.001)
    shutdown_timeout: float = setting(30.0, "seconds that running requests get to finish on SIGTERM", low=0)
    engine_timeout: float = setting(
        120.0,
        "seconds without a finished step, while there is work, after which the engine is restarted",
        low=1,
    )
    log_level: str = setting("info", "what is logged", ("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the engine: what ``LLM`` takes, as one flat set of names."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from flat names such as ``{"model": ..., "max_num_seqs": 8}``; unknown ones are refused."""
        return _from_flat(cls, values)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Settings of ``octavo serve``: the engine's and the server's."""

    server: ServerSettings = field(default_factory=ServerSettings)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> ServeConfig:
        return typing.cast(ServeConfig, _from_flat(cls, values))


def settings(config_class: type[EngineConfig]) -> Iterator[Setting]:
    """Every setting of a config class, in the order of its groups."""
    hints = typing.get_type_hints(config_class)
    for group in dataclasses.fields(config_class):
        owner = hints[group.name]
        owner_hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            kind = owner_hints[item.name]
            optional = isinstance(kind, types.UnionType)
            base = next(t for t in typing.get_args(kind) if t is not types.NoneType) if optional else kind
            meta = item.metadata
            yield Setting(
                item.name,
                group.name,
                base,
                optional,
                item.default,
                meta["help"],
                meta["choices"],
                meta["low"],
                meta["high"],
                meta["is_json"],
            )


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
    _check_combinations(config)
    return config


def _check_combinations(config: EngineConfig) -> None:
    """Refuse combinations that cannot work, whatever the model and the device are."""
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
        raise ConfigError("eviction_policy and enable_kv_events need enable_prefix_caching: else nothing is cached")
    _check_offload(config.model, cache)
    if isinstance(config, ServeConfig) and config.server.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config.server, name) is not None:
                raise ConfigError(f"{name} needs ssl_certfile: without a certificate, there is no HTTPS")
    if isinstance(config, ServeConfig) and config.server.isolate_keys and cache.enable_kv_events:
        raise ConfigError("isolate_keys and enable_kv_events: the events tell every key what the others ask")
    if isinstance(config, ServeConfig):
        _check_tenants(config.server, config.model)
    _check_policy(scheduler, cache)
    parse_speculative_config(config.speculative.speculative_config)


def _check_tenants(server: ServerSettings, model: ModelSettings) -> None:
    if server.tenant_by != "user" and server.tenant_header is not None:
        raise ConfigError("tenant_by and tenant_header both say who is charged; give one of them")
    if server.tenant_by == "key" and server.api_key_file is None:
        raise ConfigError("tenant_by key needs api_key_file: without it, there is one key at most")
    if server.tenant_by == "adapter" and not model.enable_lora:
        raise ConfigError("tenant_by adapter needs enable_lora")


def _check_offload(model: ModelSettings, cache: CacheSettings) -> None:
    if cache.kv_offload_memory is not None and not cache.enable_prefix_caching:
        raise ConfigError("kv_offload_memory needs enable_prefix_caching: it keeps what the prefix cache gives up")
    if cache.kv_offload_dir is not None and cache.kv_offload_memory is None:
        raise ConfigError("kv_offload_dir needs kv_offload_memory: blocks go to and from the disk by way of memory")
    if cache.kv_offload_disk is not None and cache.kv_offload_dir is None:
        raise ConfigError("kv_offload_disk needs kv_offload_dir")
    if cache.kv_offload_dir is not None and model.merge_lora:
        raise ConfigError("kv_offload_dir and merge_lora: files are named by the checkpoint, which is another then")


OWNERS = {
    "policy_ageing": ("priority", "shortest-first", "longest-prefix"),
    "ttft_target": ("deadline",),
    "tpot_target": ("deadline",),
    "tenant_weights": ("fair",),
    "turn_tokens": ("decode-round-robin",),
}
"""Settings that mean something under some policies only."""


def _check_policy(scheduler: SchedulerSettings, cache: CacheSettings) -> None:
    policy = scheduler.scheduling_policy
    for name, policies in OWNERS.items():
        if getattr(scheduler, name) is not None and policy not in policies:
            raise ConfigError(f"{name} needs scheduling_policy {' or '.join(policies)}; it is {policy}")
    for name in ("max_itl", "tpot_target"):
        if scheduler.decode_interval is not None and getattr(scheduler, name) is not None:
            raise ConfigError(
                f"decode_interval and {name}: one lets those who decode wait for prompts, the other forbids it"
            )
    if policy == "longest-prefix" and not cache.enable_prefix_caching:
        raise ConfigError("scheduling_policy longest-prefix needs enable_prefix_caching: it looks for cached prompts")


def parse_lora_modules(text: str | None) -> dict[str, str]:
    """Adapter names and their folders, from ``NAME=PATH,NAME=PATH``. Raises ``ConfigError``."""
    modules: dict[str, str] = {}
    for part in (text or "").split(",") if text else ():
        name, is_pair, path = (piece.strip() for piece in part.partition("="))
        if not (name and is_pair and path) or name in modules:
            raise ConfigError(f"lora_modules: {part!r} is not NAME=PATH with a name of its own")
        modules[name] = path
    return modules


def to_flat(config: EngineConfig, config_class: type[EngineConfig] | None = None) -> dict[str, Any]:
    """The inverse of ``from_flat``: flat names to values, ready for JSON; with a class, those that it has as well."""
    return {
        name: value
        for group in dataclasses.fields(config_class or config)
        for name, value in dataclasses.asdict(getattr(config, group.name)).items()
    }
