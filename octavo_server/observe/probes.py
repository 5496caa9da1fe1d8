"""Monitoring endpoints: liveness, readiness, metrics, statistics, version."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.config import to_flat
from octavo.errors import Unavailable
from octavo.setting import SECRETS
from octavo.telemetry.metrics import CONTENT_TYPE
from octavo.types import EngineInfo
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.response import json_response
from octavo_server.services import ModelServices, asked_services_of, common_services_of


def version() -> str:
    """The installed version; "0" when run from a source tree that was never installed."""
    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "0"


async def health(request: Request) -> Response:
    services = common_services_of(request)
    engine, limit = services.monitored, services.config.server.health_fail_after
    if engine.failure is not None:
        raise Unavailable("The engine does not start; it is tried again.")
    if limit is not None and engine.seconds_since_progress > limit:
        raise Unavailable(f"The engine gave no sign of life for {engine.seconds_since_progress:.1f} s.")
    return json_response({"status": "ok"}, {})


async def ready(request: Request) -> Response:
    engine = common_services_of(request).monitored
    if not engine.is_ready:
        raise Unavailable(f"The engine is not ready: last sign of life {engine.seconds_since_progress:.1f} s ago.")
    return json_response({"ready": True}, {})


async def metrics(request: Request) -> Response:
    return Response(common_services_of(request).monitored.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def stats(request: Request) -> Response:
    services = asked_services_of(request)
    engine = services.engine
    return json_response(
        {
            **_short_stats(services),
            **msgspec.structs.asdict(engine.stats),
            "num_live": engine.num_live,
            "num_restarts": engine.num_restarts,
            "is_ready": engine.is_ready,
            "seconds_since_progress": round(engine.seconds_since_progress, 3),
            "engine_pid": engine.pid,
            "is_sleeping": engine.sleep_level > 0,
            "memory": engine.info.memory,
        },
        {},
    )


def _short_stats(services: ModelServices) -> dict[str, Any]:
    """A summary under alternative names; ``used_pages`` is 0 while idle."""
    engine, stats, info = services.engine, services.engine.stats, services.engine.info
    used = stats.num_used_blocks
    return {
        "running": engine.is_ready,
        "model": services.model_name,
        "waiting_requests": stats.num_waiting,
        "active_requests": stats.num_running,
        "completed_requests": sum(part.num_completed for part in engine.metrics.engines),
        "decode_steps": stats.num_steps,
        "average_batch_size": round(stats.num_scheduled_seqs / max(1, stats.num_steps), 3),
        "max_batch_observed": max(part.max_running for part in engine.metrics.engines),
        "last_error": engine.failure,
        "cache": {
            "page_size": info.block_size,
            "max_pages": stats.num_blocks,
            "used_pages": used,
            "free_pages": stats.num_blocks - used,
            "active_sequences": stats.num_running,
            "pressure_events": stats.num_preemptions,
            "evictions": stats.num_evictions,
            "preemptions": stats.num_preemptions,
            "utilization": round(used / max(1, stats.num_blocks), 4),
            "policy": services.config.cache.eviction_policy,
        },
        "config": {**_given(services), **_resolved(info)},
    }


def _given(services: ModelServices) -> dict[str, Any]:
    """The settings, without secrets; ``None``: chosen by the engine or absent."""
    return {name: value for name, value in to_flat(services.config).items() if name not in SECRETS}


def _resolved(info: EngineInfo) -> dict[str, int]:
    """The values of settings that the engine chose where none were given."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks")
    return {name: getattr(info, name) for name in names}


async def load(request: Request) -> Response:
    """The number of live requests, for least-loaded routing; vLLM's format."""
    return json_response({"server_load": common_services_of(request).monitored.num_live}, {})


async def loads(request: Request) -> Response:
    """As ``load``, in SGLang's format: of all ranks and engines together."""
    engine = asked_services_of(request).engine
    live, running = engine.num_live, engine.stats.num_running
    counts = {"num_running_reqs": running, "num_waiting_reqs": max(0, live - running), "num_total_reqs": live}
    return json_response({"loads": [{"dp_rank": 0, **counts}]}, {})


async def get_version(request: Request) -> Response:
    backend = common_services_of(request).config.model.backend
    return json_response({"version": version(), "backend": backend}, {})


COMMON_ENDPOINTS = [
    Endpoint("GET", "/health", health, "Whether this process is alive and its engine process can be started"),
    Endpoint("GET", "/ping", health, "As `/health`, for SageMaker", name="ping"),
    Endpoint("POST", "/ping", health, "As `/health`, for SageMaker", name="post_ping"),
    Endpoint("GET", "/ready", ready, "Whether a request sent now would be computed soon"),
    Endpoint("GET", "/health_generate", ready, "As `/ready`, for SGLang's routers", name="health_generate"),
    Endpoint("GET", "/liveness", ready, "As `/ready`, for trainers", name="liveness"),
    Endpoint("GET", "/metrics", metrics, "Metrics for Prometheus"),
    Endpoint("GET", "/load", load, "How many requests are accepted and not yet ended"),
    Endpoint("GET", "/version", get_version, "The version of this server, and its backend"),
]
"""Of every application, with an engine or without."""
ENDPOINTS = [
    *COMMON_ENDPOINTS,
    Endpoint("GET", "/stats", stats, "Gauges and counters as JSON"),
    Endpoint("GET", "/v1/loads", loads, "As `/load`, in SGLang's form"),
]
