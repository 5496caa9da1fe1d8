"""The engine's interface for the HTTP layer, implemented by ``AsyncEngine`` and by a fake in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple, Protocol

from octavo.cache.kv_events import KVEvent
from octavo.errors import RequestError
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.metrics import Metrics
from octavo.types import (
    MEMORY_PARTS,
    DropTensors,
    EngineInfo,
    EngineStats,
    FinishReason,
    JoinGroup,
    MemoryPart,
    Output,
    ReceiveTensors,
    Request,
)
from octavo_server.engines.lora_adapters import AdapterTable
from octavo_server.observe.step_log import StepLog
from octavo_server.observe.timelines import KVEventRing, Timelines

SleepMode = Literal["wait", "abort", "keep"]
"""What becomes of running requests when an engine is put to sleep: see ``AsyncEngine.sleep``."""

FIRST_WEIGHTS = "default"
"""Version of the weights that a server starts with."""


class LiveProgress(NamedTuple):
    """How far a live request is, in tokens."""

    id: int
    prompt: int
    computed: int
    """Of the prompt."""
    output: int
    max_tokens: int
    running: bool
    """Whether a step has computed a part of it."""
    owner: str
    """Name of its API key."""


class OutputListener(Protocol):
    """Receives one request's outputs on the event loop, in one pass over all listeners per step; must not block."""

    def on_output(self, output: Output) -> None: ...
    def on_error(self, error: RequestError) -> None: ...
    def on_weights(self, version: str) -> None:
        """Later outputs are computed with these weights."""
        ...


class KVEventSink(Protocol):
    """Receives the prefix-cache events of one engine process after another; must not block."""

    def add(self, events: list[KVEvent]) -> None: ...
    def clear(self) -> None:
        """The engine process ended, and its cache with it."""
        ...


class Monitored(Protocol):
    """What the monitoring endpoints read, of an engine or of an upstream server."""

    metrics: Metrics

    @property
    def failure(self) -> str | None:
        """Why requests are rejected: consecutive engine starts failed. ``None`` otherwise."""
        ...

    @property
    def is_ready(self) -> bool: ...
    @property
    def num_live(self) -> int: ...
    @property
    def seconds_since_progress(self) -> float: ...


class EngineClient(Monitored, Protocol):
    """Accepts requests and delivers their outputs to listeners; see ``AsyncEngine``."""

    adapters: AdapterTable
    timelines: Timelines
    steps: StepLog
    kv_events: KVEventRing

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def live_owners(self) -> Counter[str]:
        """Number of live requests by API key."""
        ...

    def progress(self) -> Iterator[LiveProgress]:
        """How far each request is that is not finished, oldest first."""
        ...

    def cache_views(self) -> list[CacheView]:
        """The latest view of each engine's KV cache, if any; asks the engines for the next ones."""
        ...

    def set_pace(self, steps: int | None) -> None:
        """Compute so many further steps and then none; ``None``: as many as there are."""
        ...

    @property
    def sleep_level(self) -> int:
        """0 while the engine is awake."""
        ...

    async def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None: ...
    async def wake_up(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def weight_version(self) -> str: ...
    async def pause(self, mode: SleepMode = "abort") -> None: ...
    def resume(self) -> None: ...
    async def update_weights(self, model: str, version: str, mode: SleepMode = "keep") -> None: ...
    @property
    def has_received(self) -> bool:
        """Whether tensors were received that ``take_weights`` would take."""
        ...

    async def order_weights(self, order: JoinGroup | ReceiveTensors | DropTensors) -> None: ...
    async def weight_checksums(self) -> dict[str, str]: ...
    async def take_weights(self, version: str | None, mode: SleepMode = "keep") -> str: ...
    async def clear_prefix_cache(self) -> None: ...
    async def order_sessions(self, order: SessionOrder) -> SessionReport: ...
    def next_id(self) -> int: ...
    def add(self, request: Request, listener: OutputListener) -> None: ...
    def abort(self, request_id: int, reason: FinishReason = "abort") -> None: ...
    async def load_adapter(self, name: str, path: str, content: str, replaces: bool = False) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...
