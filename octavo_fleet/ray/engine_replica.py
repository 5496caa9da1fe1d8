"""The deployment of engines: each replica supervises one engine process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import ray
from ray import serve

from octavo.config import ServeConfig
from octavo.errors import RequestError
from octavo.telemetry.logs import log_to_stderr
from octavo.types import Output
from octavo_fleet.ray.messages import AnswerPart, decode_order, decode_request, encode, refusal_of
from octavo_fleet.ray.settings import GROUP_VARIABLE
from octavo_fleet.routing.prefixes import CachedPrefixes
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.wire import Refusal
from octavo_server.model_name import with_local_model

STUCK = 3
"""A replica is replaced when its engine makes no progress for this many times ``engine_timeout``, after which the
supervisor should have restarted it."""


class EngineReplica:
    """One engine. The engine process inside may die and is restarted; when the replica itself dies, the HTTP side
    continues its requests on another."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """``settings``: flat names of ``ServeConfig``."""
        if settings.get("role") == "prefill" and settings.get("kv_transfer_ssl_certfile"):
            address = ray.util.get_node_ip_address()
            settings = {**settings, "kv_transfer_address": f"{f'[{address}]' if ':' in address else address}:0"}
        config = await asyncio.to_thread(with_local_model, ServeConfig.from_flat(settings))
        log_to_stderr(config.server.log_level, config.server.log_format)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._timeout = STUCK * config.server.engine_timeout
        self._engine = AsyncEngine(config, environment=_environment() if config.model.nnodes > 1 else {})
        self._prefixes = CachedPrefixes()
        if config.cache.enable_prefix_caching:
            self._engine.send_kv_events_to(self._prefixes)
        await self._engine.start()

    async def info(self) -> bytes:
        """The engine's ``EngineInfo``."""
        return encode(self._engine.info)

    async def order_sessions(self, payload: bytes) -> bytes:
        """Do what a ``SessionOrder`` asks; the ``SessionReport``."""
        return encode(await self._engine.order_sessions(decode_order(payload)))

    async def generate(self, payload: bytes) -> AsyncIterator[bytes]:
        """Compute a ``Request``, from its output so far on; yields ``AnswerPart``s. Cancelling ends the request."""
        request = decode_request(payload)
        now = time.monotonic()
        request = msgspec.structs.replace(request, id=self._engine.next_id(), arrival=now)
        stream = _Stream()
        try:
            self._engine.add(request, stream)
        except RequestError as error:
            stream.on_error(error)
        try:
            while not stream.is_ended or stream.outputs:
                await stream.changed.wait()
                outputs = stream.take(now)
                yield encode(AnswerPart(self._name, outputs, self._engine.stats, stream.refusal))
        finally:
            self._engine.abort(request.id)

    # --- called by Ray Serve ---

    def check_health(self) -> None:
        """Raise when the replica should be replaced: the engine does not start, or makes no progress."""
        if self._engine.failure is not None:
            raise RuntimeError(self._engine.failure)
        if self._engine.seconds_since_progress > self._timeout:
            raise RuntimeError(f"no progress for {self._engine.seconds_since_progress:.0f} s")

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router wants to know."""
        info = self._engine.info
        return {
            "digest": self._prefixes.digest(),
            "block_size": info.block_size,
            "num_live": self._engine.num_live,
        }

    async def __del__(self) -> None:
        """The replica was drained, or its time to drain is over: end the engine process."""
        if hasattr(self, "_engine"):
            await self._engine.stop(0)


def _environment() -> dict[str, str]:
    """By which the engine process finds the nodes of this replica."""
    context, group = ray.get_runtime_context(), ray.util.get_current_placement_group()
    return {"RAY_ADDRESS": context.gcs_address, GROUP_VARIABLE: group.id.hex()}


class _Stream:
    """Collects the outputs of one request until they are sent: many tokens in one message when the link is slow."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.refusal: Refusal | None = None
        self.is_ended = False
        self.changed = asyncio.Event()

    def take(self, arrival: float) -> list[Output]:
        """The outputs so far, with times relative to ``arrival``."""
        taken, self.outputs = self.outputs, []
        self.changed.clear()
        for output in taken:
            if output.first_scheduled:
                output.first_scheduled = max(output.first_scheduled - arrival, 1e-6)
        return taken

    def on_output(self, output: Output) -> None:
        self.outputs.append(output)
        self.is_ended = output.finish_reason is not None
        self.changed.set()

    def on_weights(self, version: str) -> None:
        """Replicas keep their weights."""

    def on_error(self, error: RequestError) -> None:
        self.refusal = refusal_of(0, error)
        self.is_ended = True
        self.changed.set()
