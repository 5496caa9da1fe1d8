"""The application for Ray Serve: HTTP servers before engines.

    applications:
      - name: octavo
        import_path: octavo.ray:build_app
        args: {model: Qwen/Qwen3-8B, gpus_per_replica: 1, min_replicas: 1, max_replicas: 4}

``octavo_fleet.ray.settings`` has the arguments. Only public names of Ray are used.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from octavo.config import ServeConfig
from octavo.telemetry.logs import log_to_stderr
from octavo.text.tokenizer import load_tokenizer
from octavo_fleet.ray.engine_replica import EngineReplica
from octavo_fleet.ray.fleet_engine import FleetEngine
from octavo_fleet.ray.request_router import OctavoRequestRouter
from octavo_fleet.ray.settings import FleetSettings, of_role, parse, without_role
from octavo_server.app import create_app
from octavo_server.model_name import with_local_model
from octavo_server.observe.tracing import make_tracing

MAX_ONGOING = 100_000
"""Requests that Ray lets through to one replica: Octavo bounds and queues them itself."""
PATIENCE_PERIODS = 3.0
"""A prompt that was sent to an engine counts as cached there for this many periods of its reports."""
HEALTH_PERIOD_S = 5.0


class Ingress:
    """Octavo's HTTP server: validation, admission, tokenizer and streams, with the journal of live requests."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        settings: dict[str, Any],
        engines: DeploymentHandle,
        max_replicas: int,
        prefill: DeploymentHandle | None = None,
    ) -> None:
        """``settings``: flat names of ``ServeConfig``. ``prefill``: engines that compute prompts for the others."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        config = await asyncio.to_thread(with_local_model, ServeConfig.from_flat(settings))
        log_to_stderr(config.server.log_level, config.server.log_format)
        self._engine = FleetEngine(config, engines, max_replicas, prefill)
        self._engine.tracing = make_tracing(config.server, self._engine.metrics.model_name)
        await self._engine.start()
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(config.model.tokenizer or config.model.model))
        self._app = create_app(config, self._engine, tokenizer)
        await asyncio.to_thread(self._app.state.services.warm_up)

    async def __serve_build_asgi_app__(self) -> Starlette:
        return self._app

    def __del__(self) -> None:
        if hasattr(self, "_app"):
            self._app.state.services.close()
            if self._engine.tracing is not None:
                self._engine.tracing.close()


def application(args: Mapping[str, Any]) -> serve.Application:
    """The application that ``args`` describe. Raises ``ConfigError``."""
    fleet, settings = parse(args)
    options, own = engine_options(fleet, without_role(settings)), settings
    prefill = None
    if fleet.prefill_replicas:
        key = secrets.token_hex(32)
        own = of_role(settings, "decode", key)
        of_prompts = {**options, "name": "Prefill", "autoscaling_config": None, "num_replicas": fleet.prefill_replicas}
        prefill = serve.deployment(EngineReplica).options(**of_prompts).bind(of_role(settings, "prefill", key))
    engines = serve.deployment(EngineReplica).options(**options)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        num_replicas=fleet.num_ingress,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=options["graceful_shutdown_timeout_s"],
    )
    return ingress.bind(without_role(settings), engines.bind(own), fleet.max_replicas, prefill)


def engine_options(fleet: FleetSettings, settings: dict[str, Any]) -> dict[str, Any]:
    """The options of the deployment of engines."""
    config = ServeConfig.from_flat(settings)
    bundle = {"CPU": fleet.cpus_per_replica, **({"GPU": fleet.gpus_per_replica} if fleet.gpus_per_replica else {})}
    return {
        "name": "Engine",
        "max_ongoing_requests": MAX_ONGOING,
        # What a host has of an engine is on one node, as its processes share memory. The replica is the first host.
        "placement_group_bundles": [bundle] * config.model.nnodes,
        "placement_group_strategy": "STRICT_PACK" if config.model.nnodes == 1 else "STRICT_SPREAD",
        "ray_actor_options": {"num_cpus": fleet.cpus_per_replica, "num_gpus": fleet.gpus_per_replica},
        "autoscaling_config": AutoscalingConfig(
            min_replicas=fleet.min_replicas,
            max_replicas=fleet.max_replicas,
            target_ongoing_requests=fleet.target_ongoing_requests,
            upscale_delay_s=fleet.upscale_delay_s,
            downscale_delay_s=fleet.downscale_delay_s,
        ),
        "graceful_shutdown_timeout_s": config.server.shutdown_timeout,
        "health_check_period_s": HEALTH_PERIOD_S,
        "request_router_config": RequestRouterConfig(
            request_router_class=OctavoRequestRouter,
            request_router_kwargs={
                "router": fleet.router,
                "patience": PATIENCE_PERIODS * fleet.routing_stats_period_s,
                "is_only_router": fleet.num_ingress == 1,
            },
            request_routing_stats_period_s=fleet.routing_stats_period_s,
        ),
    }
