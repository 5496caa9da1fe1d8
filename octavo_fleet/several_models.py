"""Several models behind one HTTP server: ``octavo serve A B C``.

Each has its own ``AsyncEngine``. With a bound on their memory, models sleep (they have no engine process) until a
request names them. Requests wait meanwhile; the models that they wait for are woken in the order of the first such
request. To make room, the model that was used least recently is put to sleep, first of those without requests. When
all have requests, one of them finishes what it computes, while its new requests wait, and then sleeps; but only after
it was awake for ``AWAKE_FACTOR`` times as long as a waking takes, which bounds the share of time that switching costs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeVar

from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo.telemetry.metrics import Metrics, ModelsMetrics
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.several_engines import SeveralEngines
from octavo_server.model_name import served_model_names
from octavo_server.observe.timelines import Timelines

AWAKE_FACTOR = 4
POLL_SECONDS = 0.02
GIB = 1 << 30


class SleepCandidate(Protocol):
    """What the choice of the model to put to sleep depends on; see ``AsyncEngine``."""

    @property
    def num_live(self) -> int: ...
    @property
    def sleep_level(self) -> int: ...
    @property
    def is_waking(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def last_used(self) -> float: ...
    @property
    def since(self) -> float: ...
    @property
    def wake_seconds(self) -> float: ...


Model = TypeVar("Model", bound=SleepCandidate)


def has_memory(model: SleepCandidate) -> bool:
    """Whether it has an engine process, or is getting one."""
    return model.is_waking or not model.sleep_level


def choose_sleeper(models: Sequence[Model], now: float) -> Model | None:
    """The model to put to sleep for another one, or ``None`` if none may be at the time ``now``."""
    failing = [model for model in models if model.is_waking and model.failure is not None]
    awake = [model for model in models if not model.sleep_level]
    idle = [model for model in awake if not model.num_live]
    settled = [model for model in awake if now - model.since >= AWAKE_FACTOR * model.wake_seconds]
    for candidates in (failing, idle, settled):
        if candidates:
            return min(candidates, key=lambda model: model.last_used)
    return None


class ModelGroup(SeveralEngines):
    """The engines of all models, in the order of the settings; what the monitoring endpoints report on."""

    def __init__(self, configs: Sequence[ServeConfig], argv: list[str] | None = None) -> None:
        """Raises ``ConfigError`` for settings that are for a server of one model."""
        check_several(configs)
        super().__init__([AsyncEngine(config, argv) for config in configs])
        self._names = [served_model_names(config)[0] for config in configs]
        budget = configs[0].server.models_memory_budget
        self._budget = None if budget is None else int(budget * GIB)
        self.metrics: Metrics = ModelsMetrics([engine.metrics for engine in self.engines])
        self._wanted: dict[AsyncEngine, None] = {}
        """Engines to wake, in this order."""
        self._waking: asyncio.Task[None] | None = None
        timelines, ids = Timelines(), itertools.count(1)
        for engine in self.engines:
            engine.timelines, engine.ids = timelines, ids
            engine.on_wanted = partial(self.want, engine)

    async def start(self) -> None:
        """Start all engines; with a bound, one after the other, as their memory is known when they have started.

        The models at the front of the list are awake afterwards, as far as they fit. Raises the first error.
        """
        if self._budget is None:
            await asyncio.gather(*(engine.start() for engine in self.engines))
            return
        for name, engine in zip(reversed(self._names), reversed(self.engines), strict=True):
            await engine.start()
            if (size := size_of(engine)) > self._budget:
                message = f"{name} alone takes {size / GIB:.2f} GiB, the bound is {self._budget / GIB:.2f} GiB"
                raise ConfigError(f"models_memory_budget: {message}")
            if engine is not self.engines[0]:
                await engine.sleep()
        await asyncio.gather(*(engine.wake_up() for engine in self._first_that_fit()))

    def _first_that_fit(self) -> list[AsyncEngine]:
        assert self._budget is not None
        sizes = itertools.accumulate(size_of(engine) for engine in self.engines)
        return [engine for engine, size in zip(self.engines, sizes, strict=True) if size <= self._budget]

    async def stop(self, timeout: float) -> None:
        """Drain all engines, then stop them."""
        await super().stop(timeout)
        if self._waking is not None:
            self._waking.cancel()

    # --- state ---

    @property
    def seconds_since_progress(self) -> float:
        """Of the engine that was heard of least recently."""
        return max(engine.seconds_since_progress for engine in self.engines)

    @property
    def num_bytes(self) -> int:
        """Memory of the models that are not asleep."""
        return sum(size_of(engine) for engine in self.engines if has_memory(engine))

    # --- waking ---

    def want(self, engine: AsyncEngine) -> None:
        """Wake ``engine`` when there is room, after those that are wanted already."""
        self._wanted.setdefault(engine)
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake_wanted())

    async def _wake_wanted(self) -> None:
        while self._wanted:
            engine = next(iter(self._wanted))
            if has_memory(engine):
                del self._wanted[engine]
            elif self._budget is None or size_of(engine) + self.num_bytes <= self._budget:
                del self._wanted[engine]
                engine.start_waking()
            elif (sleeper := choose_sleeper(self.engines, time.monotonic())) is not None:
                await sleeper.sleep()
            else:
                await asyncio.sleep(POLL_SECONDS)


def size_of(engine: AsyncEngine) -> int:
    """Bytes that the engine reserves for weights, KV cache and activations."""
    return sum(engine.info.memory.values())


def check_several(configs: Sequence[ServeConfig]) -> None:
    """Raise ``ConfigError`` for settings that only a server of one model can have, and for names used twice."""
    names = [name for config in configs for name in served_model_names(config)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"served_model_name: two models would be called {', '.join(twice)}")
    plain = ServeConfig()
    for config in configs:
        for group, setting in (
            *(("server", name) for name in ("data_parallel_size", "kv_events_config", "upstream")),
            *(("model", name) for name in ("enable_lora", "lora_modules", "grpc_worker")),
            ("cache", "kv_offload_dir"),
        ):
            if getattr(getattr(config, group), setting) != getattr(getattr(plain, group), setting):
                raise ConfigError(f"{setting}: is for a server of one model")
