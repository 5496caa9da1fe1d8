"""The arguments of ``octavo.ray:build_app``: those of the fleet, and every setting of ``octavo serve``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo_fleet.routing.routers import ROUTERS

REFUSED = (
    *("port", "ssl_certfile", "data_parallel_size", "state_dir", "kv_events_config", "enable_kv_events"),
    *("kv_offload_dir", "journal", "role", "kv_transfer_address", "distributed_executor_backend", "headless"),
)
"""Settings of a single HTTP server, a folder that engines of one node would share, and what the fleet sets itself."""
GROUP_VARIABLE = "OCTAVO_RAY_PLACEMENT_GROUP"
"""Environment variable by which an engine process gets the placement group of its replica, in hexadecimal."""


class FleetSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How many engines there are, what each gets, and how requests are routed to them."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 32
    """Unfinished requests per engine that autoscaling aims at."""
    upscale_delay_s: float = 10
    downscale_delay_s: float = 300
    prefill_replicas: int = 0
    """Further engines that compute long prompts for the others; of other nodes, they need kv_transfer_ssl_certfile."""
    gpus_per_replica: int = 0
    """GPUs of one node for each engine; 0: an engine on CPUs."""
    cpus_per_replica: float = 1
    """On each of the engine's nodes."""
    num_ingress: int = 1
    """Processes that serve HTTP: validation, tokenisation, streams."""
    router: str = "prefix-aware"
    routing_stats_period_s: float = 1.0
    """How often each engine reports the digest of its prefix cache and its load."""


def parse(arguments: Mapping[str, Any]) -> tuple[FleetSettings, dict[str, Any]]:
    """The fleet's settings, and the flat settings of ``ServeConfig``. Raises ``ConfigError``."""
    own = {name: value for name, value in arguments.items() if name in FleetSettings.__struct_fields__}
    try:
        fleet = msgspec.convert(own, FleetSettings, strict=False)  # `serve run` gives text
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    rest = {name: value for name, value in arguments.items() if name not in own}
    for name in REFUSED:
        if name in rest:
            raise ConfigError(f"{name}: does not apply to a fleet on Ray")
    settings = {"host": "0.0.0.0", **rest}
    if str(rest.get("nnodes", 1)) != "1":
        settings["distributed_executor_backend"] = "ray"
    if fleet.prefill_replicas < 0:
        raise ConfigError("prefill_replicas must not be negative")
    ServeConfig.from_flat(of_role(settings, "decode", "key") if fleet.prefill_replicas else settings)
    if not 1 <= fleet.min_replicas <= fleet.max_replicas:
        raise ConfigError("min_replicas must be at least 1, and at most max_replicas")
    if fleet.gpus_per_replica < 0 or fleet.cpus_per_replica <= 0 or fleet.num_ingress < 1:
        raise ConfigError("gpus_per_replica must not be negative, cpus_per_replica and num_ingress must be positive")
    if fleet.target_ongoing_requests <= 0 or fleet.routing_stats_period_s <= 0:
        raise ConfigError("target_ongoing_requests and routing_stats_period_s must be positive")
    if fleet.router not in ROUTERS:
        raise ConfigError(f"router: {fleet.router!r} is not one of {', '.join(ROUTERS)}")
    return fleet, settings


def of_role(settings: Mapping[str, Any], role: str, key: str) -> dict[str, Any]:
    """The settings of an engine that computes prompts for others, or goes on from theirs; ``key`` is for a fleet that
    was given none."""
    return {"kv_transfer_key": key, **settings, "role": role}


def without_role(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of what has no engine."""
    return {name: value for name, value in settings.items() if not name.startswith("kv_transfer_")}
