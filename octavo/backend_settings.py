"""Which settings each backend honours: one that would have no effect is refused at start, by name."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.errors import ConfigError
from octavo.plugins import ENGINE_BACKENDS, FRONTS, MODEL_BACKENDS, parts

BACKENDS = ("octavo", *parts(MODEL_BACKENDS), *parts(ENGINE_BACKENDS), *parts(FRONTS))
WITHOUT_MODEL = ("toy", "instant", "openai")
"""Backends that load no checkpoint; for toy and instant, the model is a name."""
_UPSTREAM = frozenset({"upstream", "prefill_upstream", "upstream_command", "upstream_api_key"})
_SCHEDULER = frozenset(
    {
        *("max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "policy_ageing", "ttft_target"),
        *("tpot_target", "tenant_weights", "turn_tokens", "preemption_victim", "max_itl"),
        "step_log",
    }
)
_CACHE = frozenset(
    {*("block_size", "num_kv_blocks", "enable_prefix_caching", "eviction_policy", "kv_watermark"), "enable_kv_events"}
)
_CHAT = frozenset({"chat_template", "allow_special_tokens_in_messages"})
_WORKER = frozenset({"grpc_worker", "grpc_timeout", "grpc_ssl_ca_certs", "grpc_api_key"})
_ENGINE = {
    "transformers": _SCHEDULER
    | _CACHE
    | _CHAT
    | {
        *("model", "tokenizer", "generation_config", "dtype", "device", "max_model_len", "seed"),
        *("revision", "download_dir", "kv_cache_memory", "gpu_memory_utilization"),
    },
    "grpc": _SCHEDULER
    | (_CACHE - {"block_size", "num_kv_blocks"})
    | _WORKER
    | _CHAT
    | {"model", "tokenizer", "generation_config", "max_model_len", "seed", "revision", "download_dir"},
    "toy": _SCHEDULER | _CACHE | _CHAT | {"model", "max_model_len"},
    "instant": _CHAT | {"model", "max_model_len", "max_num_seqs"},
    "openai": frozenset({"max_num_seqs"}),
}
"""Settings of the engine that a backend honours; those that are not here honour all but those of a worker."""
_PROXY = _UPSTREAM | {
    *("host", "port", "api_key", "api_key_file", "admin_key", "allowed_hosts", "allowed_origins", "ssl_certfile"),
    *("ssl_keyfile", "ssl_ca_certs", "max_num_queued_reqs", "max_request_bytes", "shutdown_timeout"),
    *("engine_timeout", "request_timeout", "log_level", "log_format", "access_log"),
}
"""Settings of the server that the openai backend honours; the others honour all but those of the upstream."""


def check_backend(backend: str, given: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a setting that ``backend`` does not honour.

    ``given`` maps the settings that differ from their defaults to their groups.
    """
    for name, group in given.items():
        if name != "backend" and not is_honoured(backend, name, group):
            raise ConfigError(f"{name}: has no effect with backend {backend}; leave it out")
    if backend == "openai" and "upstream" not in given:
        raise ConfigError("backend openai needs upstream, the URL of the server that requests are forwarded to")
    if backend == "grpc" and "grpc_worker" not in given:
        raise ConfigError("backend grpc needs grpc_worker, the address HOST:PORT of the worker")


def is_honoured(backend: str, name: str, group: str = "") -> bool:
    """Whether a setting of a group, by default one of the engine's, has an effect with ``backend``."""
    if group == "server":
        return name in _PROXY if backend == "openai" else name not in _UPSTREAM
    honoured = _ENGINE.get(backend)
    return name not in _WORKER if honoured is None else name in honoured
