"""Several engine processes behind one HTTP server: ``--data-parallel-size``.

Each has its own ``AsyncEngine``, with a supervisor and a journal of its own, so the death of one is survived as that of
a single engine is: its live requests continue when it is back, and until then new ones go to the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from octavo.cache.kv_events import KVEvent
from octavo.config import ServeConfig
from octavo.errors import ConfigError, OctavoError, RequestFailed
from octavo.system.cpus import num_cpus
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.metrics import FleetMetrics, Metrics
from octavo.types import MEMORY_PARTS, EngineInfo, EngineStats, FinishReason, MemoryPart, Request
from octavo_fleet.routing.prefixes import CachedPrefixes, PromptQuery
from octavo_fleet.routing.routers import make_router
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.engine_client import LiveProgress, OutputListener, SleepMode
from octavo_server.engines.engine_stats import summed
from octavo_server.engines.several_engines import SeveralEngines, errors_of
from octavo_server.observe.step_log import StepLog
from octavo_server.observe.timelines import KVEventRing, Timelines

GPUS = Path("/proc/driver/nvidia/gpus")


class DataParallelEngine(SeveralEngines):
    """An ``EngineClient`` that routes requests to ``data_parallel_size`` engine processes."""

    def __init__(self, config: ServeConfig, argv: list[str] | None = None) -> None:
        size = config.server.data_parallel_size
        own = dataclasses.replace(config, cache=dataclasses.replace(config.cache, enable_kv_events=False))
        environments = environments_of(config.model.device, size, config.model.num_ranks)
        super().__init__([AsyncEngine(own, argv, rank, each) for rank, each in enumerate(environments)])
        self.metrics: Metrics = FleetMetrics(
            self.engines[0].metrics.model_name, [each.metrics for each in self.engines]
        )
        self.adapters = self.engines[0].adapters
        self.timelines = Timelines()
        self.steps = StepLog()
        self.kv_events = KVEventRing()
        self._replicas = [_Replica(engine) for engine in self.engines]
        self._router = make_router(config.server.data_parallel_router)
        self._ids = itertools.count(1)
        for rank, (engine, replica) in enumerate(zip(self.engines, self._replicas, strict=True)):
            engine.timelines, engine.steps = self.timelines, self.steps
            if config.server.data_parallel_router == "prefix-aware" and config.cache.enable_prefix_caching:
                engine.send_kv_events_to(replica.prefixes)
            if config.cache.enable_kv_events:
                engine.send_kv_events_to(_RankedEvents(self.kv_events, rank))

    async def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None:
        """Put all engines to sleep, as ``AsyncEngine.sleep`` does; each wakes when it gets a request."""
        await asyncio.gather(*(engine.sleep(level, mode) for engine in self.engines))

    async def wake_up(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        await asyncio.gather(*(engine.wake_up(parts) for engine in self.engines))

    @property
    def is_paused(self) -> bool:
        return any(engine.is_paused for engine in self.engines)

    @property
    def weight_version(self) -> str:
        """Of the first engine; ``add`` tells a listener where it is another one's."""
        return self.engines[0].weight_version

    async def pause(self, mode: SleepMode = "abort") -> None:
        await asyncio.gather(*(engine.pause(mode) for engine in self.engines))

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()

    async def order_sessions(self, order: SessionOrder) -> SessionReport:
        """Ask all engines; a session that was moved is of several."""
        return SessionReport.joined(await asyncio.gather(*(engine.order_sessions(order) for engine in self.engines)))

    async def clear_prefix_cache(self) -> None:
        await asyncio.gather(*(engine.clear_prefix_cache() for engine in self.engines))

    # --- state ---

    @property
    def info(self) -> EngineInfo:
        """That of the first engine, with the number of sequences of all."""
        info = self.engines[0].info
        return msgspec.structs.replace(info, max_num_seqs=info.max_num_seqs * len(self.engines))

    @property
    def stats(self) -> EngineStats:
        return summed(engine.stats for engine in self.engines)

    @property
    def sleep_level(self) -> int:
        """0 while any engine is awake."""
        return min(engine.sleep_level for engine in self.engines)

    @property
    def num_restarts(self) -> int:
        return sum(engine.num_restarts for engine in self.engines)

    @property
    def pid(self) -> int | None:
        return self.engines[0].pid

    @property
    def seconds_since_progress(self) -> float:
        """Of the engine that was heard of last; the metrics have each one's."""
        return min(engine.seconds_since_progress for engine in self.engines)

    def cache_views(self) -> list[CacheView]:
        """The latest view of each engine's KV cache, if any; asks the engines for the next ones."""
        return [view for engine in self.engines for view in engine.cache_views()]

    def set_pace(self, steps: int | None) -> None:
        for engine in self.engines:
            engine.set_pace(steps)

    # --- requests ---

    def progress(self) -> Iterator[LiveProgress]:
        return heapq.merge(*(engine.progress() for engine in self.engines))

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, request: Request, listener: OutputListener) -> None:
        """Accept a request, as ``AsyncEngine.add`` does."""
        ready = [replica for replica in self._replicas if replica.engine.is_ready]
        if not ready:  # those that restart keep it until they are back
            ready = [replica for replica in self._replicas if replica.engine.failure is None] or self._replicas
        engine = self._router.choose(PromptQuery.of(request), ready).engine
        if engine.weight_version != self.weight_version:  # one has lost what was broadcast, or is updated later
            listener.on_weights(engine.weight_version)
        engine.add(request, listener)

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        for engine in self.engines:
            engine.abort(request_id, reason)

    # --- adapters ---

    async def load_adapter(self, name: str, path: str, content: str, replaces: bool = False) -> None:
        """Load an adapter into all engines; when one refuses it, those that had taken it go back.

        The first is the last: requests name what it has, which all others have by then.
        """
        old, done = self.adapters.known.get(name), list[AsyncEngine]()
        for engine in reversed(self.engines):
            try:
                await engine.load_adapter(name, path, content, replaces)
            except OctavoError as error:
                back = await errors_of(
                    earlier.unload_adapter(name)
                    if old is None  # else it comes back by its alias, which is what requests name
                    else earlier.load_adapter(name, old.path, old.digest, True, old.alias)
                    for earlier in done
                )
                if any(back):
                    raise RequestFailed(f"{error} The engines now have different adapters '{name}'.") from error
                raise
            done.append(engine)

    async def unload_adapter(self, name: str) -> None:
        await asyncio.gather(*(engine.unload_adapter(name) for engine in self.engines))


class _Replica:
    """An engine as routers see it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.prefixes = CachedPrefixes()

    @property
    def num_live(self) -> int:
        return self.engine.num_live

    def num_live_of(self, tenant: str) -> int:
        return self.engine.num_live_of[tenant]

    def num_cached_blocks(self, query: PromptQuery) -> int:
        return self.prefixes.num_cached_blocks(query, self.engine.info.block_size)


class _RankedEvents:
    """Writes one engine's KV events into the ring of all."""

    def __init__(self, ring: KVEventRing, rank: int) -> None:
        self._ring = ring
        self._rank = rank

    def add(self, events: list[KVEvent]) -> None:
        self._ring.add(events, self._rank)

    def clear(self) -> None:
        self._ring.clear(self._rank)


def environments_of(device: str, size: int, num_ranks: int) -> list[Mapping[str, str]]:
    """Environment variables of each of ``size`` engine processes: a GPU for each of its ``num_ranks`` ranks, or its
    share of this machine's cores.

    Raises ``ConfigError`` when there are fewer GPUs than ranks of all engines.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    devices = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    if device != "cpu" and devices:
        if len(devices) < size * num_ranks:
            each = f" of {num_ranks} ranks (tensor_parallel_size)" if num_ranks > 1 else ""
            raise ConfigError(
                f"data_parallel_size: {size} engines{each} need {size * num_ranks} GPUs, and {len(devices)} are visible"
            )
        parts = [devices[first : first + num_ranks] for first in range(0, size * num_ranks, num_ranks)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]
    if "OMP_NUM_THREADS" in os.environ:
        return [{}] * size
    return [{"OMP_NUM_THREADS": str(max(1, num_cpus() // size))}] * size
