"""The engine as the front process sees it: accepts requests, notifies listeners, survives engine restarts.

Every accepted request is kept here with its output until it ends. When the engine process dies or hangs, the
supervisor starts another, and all live requests are resubmitted as prompt + output so far; listeners only notice a
pause. While the engine sleeps it has no process; requests wait, and the first one wakes it. Everything here runs on one
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path

from octavo.config import ServeConfig
from octavo.errors import InvalidParameter, RequestError, RequestFailed, Unavailable, Withdrawn
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.counts import Condition, Timing
from octavo.telemetry.metrics import Metrics
from octavo.types import (
    MEMORY_PARTS,
    AskReceiver,
    ChecksumWeights,
    DropTensors,
    EngineInfo,
    EngineStats,
    FinishReason,
    JoinGroup,
    MemoryPart,
    ReceiveTensors,
    Request,
    TakeWeights,
)
from octavo_server.engines import wire
from octavo_server.engines.crash_isolation import CrashIsolation
from octavo_server.engines.engine_client import FIRST_WEIGHTS, KVEventSink, OutputListener, SleepMode
from octavo_server.engines.engine_link import EngineLink
from octavo_server.engines.engine_stats import TotalStats
from octavo_server.engines.live_request import LiveRequest, adapters_of
from octavo_server.engines.lora_adapters import AdapterTable, adapter_name
from octavo_server.engines.request_table import RequestJournal, had_grammars
from octavo_server.engines.supervisor import Supervisor, engine_settings
from octavo_server.observe.step_log import StepLog
from octavo_server.observe.timelines import KVEventRing, Timelines

ENGINE_ARGV = (sys.executable, "-m", "octavo_server.engines.engine_process")
PATIENCE = 5
"""Consecutive failed engine starts after which new requests are rejected."""
READY_SECONDS = 5.0
"""After this much silence the engine is reported as not ready, though it may only be slow."""
STOP_GRACE = 9.0
"""Seconds between the stop message and SIGKILL."""
DRAIN_POLL_SECONDS = 0.02

logger = logging.getLogger("octavo.server")


class AsyncEngine(RequestJournal):
    """The server's engine client, independent of any single engine process.

    ``argv`` is the engine process's command line without its last argument, the inherited socket's descriptor.
    ``rank`` is its data-parallel rank, and ``environment`` has further environment variables for its engine process.
    """

    def __init__(
        self,
        config: ServeConfig,
        argv: list[str] | None = None,
        rank: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.metrics = Metrics((config.server.served_model_name or config.model.model).partition(",")[0], config, rank)
        self.metrics.condition = self._condition
        self.timelines, self.steps, self.kv_events = Timelines(), StepLog(), KVEventRing()
        self.failure: str | None = None
        """Why requests are rejected: ``PATIENCE`` consecutive engine starts failed. ``None`` otherwise."""
        self.adapters = AdapterTable(config.model)
        self._engine_settings = engine_settings(config)
        """Flat ``EngineConfig`` sent to the next engine process."""
        self._supervisor = Supervisor(
            argv or ENGINE_ARGV, self._engine_settings, config.server.engine_timeout, self, environment or {}
        )
        self.expects_grammars = had_grammars(config.server)
        """Whether there was a request with a grammar, in this process or in one before it with the same journal."""
        self._kv_event_sinks: list[KVEventSink] = [self.kv_events] if config.cache.enable_kv_events else []
        self._isolation = CrashIsolation()
        self._info: EngineInfo | None = None
        self._has_engine = False
        """Between the supervisor's ``on_up`` and ``on_down``."""
        self.sleep_level = 0
        """0 while the engine is awake; else that of the last ``sleep``, until an engine process is ready again."""
        self.asleep = frozenset[MemoryPart]()
        """Parts of its memory that nobody has woken yet; the first request wakes all of them."""
        self.on_wanted = self.start_waking
        """Called for each request that arrives while the engine sleeps."""
        self.is_waking = False
        self.last_used = self.since = self.wake_seconds = 0.0
        """Monotonic times of the last request's arrival and of when it woke, and how long the last waking took."""
        self.is_paused = False
        """Between ``pause`` and ``resume``: requests wait."""
        self.weight_version = FIRST_WEIGHTS
        """That of the last ``update_weights`` or ``take_weights``."""
        self._folder_version, self._first_model = FIRST_WEIGHTS, config.model.model
        """That of the folder which the next engine process loads."""
        self._holder = 0
        """Generation of the engine process that has received weights, which are lost with it; 0: none has."""
        self.has_received = False
        """Whether tensors were received that ``take_weights`` would take."""
        self.num_received = self._num_groups = 0
        self._update_error = ""
        """Why the last update's weights could not be loaded."""
        self._holds_new = False
        """Between the call of ``sleep`` and its end: new requests wait, running ones are finished."""
        self._previous_model: str | None = None
        """During ``update_weights``: the folder to load again if the new one cannot be loaded."""
        self._next_version: str | None = None
        """That of the weights which the next engine process has, if it is another one."""
        self._changing_weights, self._changing_sleep, self._changing_adapters = (asyncio.Lock() for _ in range(3))
        self._is_draining, self._num_sleeps = False, 0
        self._total_stats = TotalStats()
        self._cache_view: CacheView | None = None

    def send_kv_events_to(self, sink: KVEventSink) -> None:
        """Let ``sink`` receive the prefix cache's events; to be called before ``start``."""
        self._kv_event_sinks.append(sink)
        self._engine_settings["enable_kv_events"] = True

    # --- life ---

    async def start(self) -> None:
        """Start the engine process and wait until it is ready.

        Raises ``ConfigError`` or ``CheckpointError`` with the engine process's own message when it cannot be
        built, and ``OctavoError`` when the process ends for another reason.
        """
        await self._supervisor.start()

    async def stop(self, timeout: float) -> None:
        """Drain: reject new requests, wait up to ``timeout`` seconds for live ones, then stop the engine process.

        Requests that wait for a sleeping engine fail at once.
        """
        self._is_draining = True
        deadline = time.monotonic() + timeout
        while self._live and (self.is_waking or not self.sleep_level) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for live in list(self._live.values()):
            self._fail(live, Unavailable("The server shut down before this request was finished."))
        await self._supervisor.stop(STOP_GRACE)

    async def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None:
        """Free the engine's memory until ``wake_up`` or the next request.

        The engine process ends, unless at level 1 it can keep its weights in host memory. ``mode`` is what becomes of
        running requests: they are finished first, or end with ``Unavailable``, or continue from where they are when the
        engine wakes. Requests that arrive meanwhile wait, and then wake the engine.
        """
        async with self._changing_sleep:
            if self.asleep == {*MEMORY_PARTS} and not (level > 1 and self._supervisor.link is not None):
                self.sleep_level = level
                return
            self._holds_new = True
            try:
                await self._withdraw(mode, "The model was put to sleep before this request was finished.")
                if not await self._supervisor.sleep(STOP_GRACE, level == 1 and self.info.sleeps_in_host_memory):
                    self._on_end()
                self._has_engine, self._cache_view = False, None
                self._isolation.hold_all(self._live.values())
                self.sleep_level, self.is_waking, self.failure = level, False, None
                self.asleep = frozenset(MEMORY_PARTS)
                self._num_sleeps += 1
                logger.info("%s sleeps", self.metrics.model_name)
            finally:
                self._holds_new = False
                self._isolation.holds_back = True
                self._admit_waiting()
        if self._live and mode != "keep" and not self.is_paused:
            self.on_wanted()

    async def _withdraw(self, mode: SleepMode, message: str) -> None:
        """Take the running requests back from the engine process; those that ``mode`` aborts fail with ``message``."""
        if mode == "abort":
            for live in list(self._live.values()):
                self._fail(live, Withdrawn(message))
        while mode == "wait" and any(live.is_submitted for live in self._live.values()):
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for live in self._live.values():
            self._forget(live)

    async def wake_up(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Wait until an engine process is ready, or sleeps again; starts one if it sleeps. Raises ``Unavailable``.

        Until all ``parts`` were named it still sleeps; a process that was kept has no memory for the others.
        """
        async with self._changing_sleep:
            left, num_sleeps = self.asleep - {*parts}, self._num_sleeps
            if self.sleep_level and not left:
                self.on_wanted()
            elif left and left != self.asleep:
                if not await self._supervisor.wake_part(self.asleep - left):
                    self.start_waking(left & self.asleep)  # a request that came meanwhile wakes all
                elif self.asleep:  # no request has come meanwhile, for which all wakes
                    self.asleep, self._has_engine = left, True
        while self.sleep_level and (self.is_waking or not left) and num_sleeps == self._num_sleeps:
            if self.failure is not None or self._is_draining:
                raise Unavailable("The engine does not start now.", retry_after=5)
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def start_waking(self, left: frozenset[MemoryPart] = frozenset()) -> None:
        """Start an engine process if the engine sleeps. Unless parts are ``left``, ``sleep_level`` is then 0."""
        if not self.sleep_level or self._is_draining:
            return
        self.asleep = left
        if not left and self._up is not None and not self._supervisor.is_asleep:
            self.sleep_level = 0
            self._admit_waiting()
        elif not self.is_waking:
            self.is_waking, self.since = True, time.monotonic()
            logger.info("%s wakes; waiting requests: %d", self.metrics.model_name, self.num_live)
            self._supervisor.wake()

    async def pause(self, mode: SleepMode = "abort") -> None:
        """Compute nothing until ``resume``; ``mode`` is what becomes of running requests, as for ``sleep``."""
        async with self._changing_sleep:
            self.is_paused = True
            await self._withdraw(mode, "The server was paused before this request was finished.")
            if (link := self._up) is not None:
                await link.settle()  # a request that is submitted again must contain all of its output
            self._isolation.hold_all(self._live.values())

    def resume(self) -> None:
        """Go on after ``pause``."""
        self.is_paused = False
        self._isolation.holds_back = True
        self._admit_waiting()
        if self.sleep_level and self._live:
            self.on_wanted()

    @property
    def weights_folder(self) -> tuple[str, str]:
        """What the next engine process loads, and the version of that."""
        return self._engine_settings["model"], self._folder_version

    async def update_weights(self, model: str, version: str, mode: SleepMode = "keep") -> None:
        """Serve the weights of another folder with the same configuration, as ``version``.

        The engine process writes them over the earlier ones. If it cannot, the next engine process loads them. Each
        step has the weights of one version. Running requests continue from where they are, unless ``mode`` says
        otherwise. Raises ``InvalidParameter`` if they cannot be loaded: the engine then has the earlier ones again.
        """
        async with self._changing_weights:
            if not (reason := await self._change_in_place(TakeWeights(model), version, mode)):
                self._engine_settings["model"], self._folder_version, self._holder = model, version, 0
                return
            logger.info("weights are not changed in place, but by a new engine process: %s", reason)
            self._previous_model, self._next_version = self._engine_settings["model"], version
            self._engine_settings["model"], self._update_error = model, ""
            try:
                await self.sleep(2, mode)
                await self.wake_up()
            finally:
                self._previous_model = None
            if self._update_error:
                raise InvalidParameter("weight_dir", f"These weights cannot be loaded: {self._update_error}")

    async def order_weights(self, order: JoinGroup | ReceiveTensors | DropTensors) -> None:
        """Have weights be received, and wait until they are, or another order leaves. Raises ``InvalidParameter``."""
        self._num_groups += isinstance(order, JoinGroup) or order == DropTensors(leaves_group=True)
        group = self._num_groups
        async with self._changing_weights:
            self.has_received = False
            async with self._awake_weights() as link:
                error, is_busy = await link.order_weights(order)
            while is_busy and not error:
                await asyncio.sleep(DRAIN_POLL_SECONDS)
                error, is_busy = await link.order_weights(AskReceiver())
                if is_busy and group != self._num_groups:
                    error = "its group was left, or another one joined"
            if error:
                raise InvalidParameter("update_info", error)
            self.has_received = isinstance(order, ReceiveTensors)

    @contextlib.asynccontextmanager
    async def _awake_weights(self) -> AsyncIterator[EngineLink]:
        """The engine process, which does not fall asleep in this block. Raises ``Unavailable`` while it restarts.

        It wakes unless its weights are awake, as a trainer may have the memory of the rest.
        """
        while True:
            if not self._has_weights:
                await self.wake_up()
            async with self._changing_sleep:
                if self._has_weights:
                    if (link := self._up) is None:
                        raise Unavailable("The engine is restarting.", retry_after=5)
                    yield link
                    return

    async def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of the weights in memory, by rank and place in the model. Raises ``InvalidParameter``."""
        async with self._changing_weights, self._awake_weights() as link:
            error, _ = await link.order_weights(ChecksumWeights())
            if error:
                raise InvalidParameter("action", f"There are no checksums: {error}.")
            return link.checksums

    async def take_weights(self, version: str | None, mode: SleepMode = "keep") -> str:
        """Serve the weights that were received, as ``version``, which is returned, or the number of such updates.

        As ``update_weights``, but the next engine process has the weights of the folder again.
        """
        async with self._changing_weights:
            version, self.has_received = version or str(self.num_received + 1), False
            if error := await self._change_in_place(TakeWeights(), version, mode):
                raise InvalidParameter("update_info", f"These weights cannot be taken: {error}")
            self._holder = self._supervisor.generation
            self.num_received += 1
            return version

    async def _change_in_place(self, order: TakeWeights, version: str, mode: SleepMode) -> str:
        """Change the weights between two steps; return why that is not possible, "" if it was."""
        if self._info is None or not self._info.changes_weights:
            return "this engine cannot"
        async with self._changing_sleep:
            link = self._up
            if not self._has_weights or link is None:
                return "the engine sleeps or restarts"
            self._holds_new = True
            try:
                await self._withdraw(mode, "The weights were changed before this request was finished.")
                await link.settle()  # a request that is submitted again must contain all of its output
                error, _ = await link.order_weights(order)
                self._isolation.hold_all(self._live.values())
                if not error:
                    self._note_weights(version)
            finally:
                self._holds_new = False
                self._isolation.holds_back = True
                self._admit_waiting()
            return error

    def _note_weights(self, version: str) -> None:
        self.weight_version = version
        for live in self._live.values():
            live.listener.on_weights(version)

    async def clear_prefix_cache(self) -> None:
        """Drop what the prefix cache holds of ended requests."""
        if (link := self._up) is not None and not self.sleep_level:
            await link.settle(clears_cache=True)

    async def order_sessions(self, order: SessionOrder) -> SessionReport:
        """Do what is asked about sessions; an engine that sleeps or restarts has none."""
        if (link := self._up) is not None and not self.sleep_level:
            return await link.order_sessions(order)
        return SessionReport()

    # --- state ---

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The latest statistics; counters accumulate over engine restarts."""
        return self.metrics.stats

    @property
    def is_ready(self) -> bool:
        """Whether a request accepted now would be scheduled without waiting for a restart; a sleeping engine wakes."""
        if self.sleep_level:
            return self._accepts
        return self._accepts and self._up is not None and self.seconds_since_progress < READY_SECONDS

    @property
    def num_restarts(self) -> int:
        return self.metrics.restarts

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the engine process's last message: a step's report, or a ping's answer while idle."""
        link = self._supervisor.link
        return 0.0 if link is None or self.sleep_level else time.monotonic() - link.last_sign

    @property
    def pid(self) -> int | None:
        """Process id of the current engine process."""
        link = self._supervisor.link
        return None if link is None else link.pid

    def cache_views(self) -> list[CacheView]:
        """The latest view of the KV cache, if any; asks the engine process for the next one."""
        if (link := self._up) is not None:
            link.send(wire.Ping(link.generation, wants_view=True))
        return [] if self._cache_view is None else [self._cache_view]

    def set_pace(self, steps: int | None) -> None:
        """Let the engine process compute so many further steps and then hold; ``None``: go on. The next one goes on."""
        if (link := self._up) is not None:
            link.send(wire.Pace(link.generation, steps))

    @property
    def _accepts(self) -> bool:
        return self._info is not None and self.failure is None and not self._is_draining

    @property
    def _up(self) -> EngineLink | None:
        """The engine process, while it takes requests."""
        link = self._supervisor.link
        return link if self._has_engine and link is not None and link.is_ready else None

    @property
    def _is_holding(self) -> bool:
        """Whether new requests wait, although there is an engine process."""
        return self._holds_new or self.is_paused or self.sleep_level > 0

    @property
    def _has_weights(self) -> bool:
        """Whether the weights are awake."""
        return not self.sleep_level or (self._up is not None and self.asleep == {"kv_cache"})

    def _condition(self) -> Condition:
        adapters = adapters_of(self._live.values())
        return Condition(self.num_live, self.is_ready, self.seconds_since_progress, *adapters, self.sleep_level)

    # --- requests ---

    def add(self, request: Request, listener: OutputListener) -> None:
        """Accept a request; ``listener`` is then guaranteed a final output or error, also across engine restarts.

        Raises ``Unavailable`` when not started, draining or failed, and ``InvalidParameter`` for a request that
        cannot be encoded. While the engine process restarts or sleeps, requests are accepted and wait.
        """
        if not self._accepts:
            what = "The server takes no requests now." if self.failure is None else "The engine does not start now."
            raise Unavailable(what, retry_after=5)
        if request.id in self._live:
            raise ValueError(f"request id {request.id} is in use")
        live = LiveRequest(request, listener, Timing(request.arrival or time.monotonic()))
        if self._up is not None and not self._is_holding and not self._isolation.holds_back:
            try:
                self._submit(live)
            except wire.FrameError as error:
                raise InvalidParameter("request", str(error)) from None
            live.is_submitted = True
        self._keep(live)
        self.expects_grammars |= request.params.grammar is not None
        self.last_used = time.monotonic()
        if self.sleep_level and not self.is_paused:
            self.on_wanted()

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """End a request without notifying its listener; an id that is not live is ignored.

        ``reason`` is the finish reason in the metrics: ``"stop"`` when the listener found a stop string.
        """
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, reason)
            self._forget(live)
            self._admit_waiting()

    # --- adapters ---

    async def load_adapter(self, name: str, path: str, content: str, replaces: bool = False, alias: str = "") -> None:
        """Load an adapter, so that requests can name it; see ``AdapterTable.add``. Wakes the weights.

        With ``replaces``, one of that name may be loaded; requests that began with it end with it. Raises
        ``InvalidParameter`` if the engine rejects it, and ``Unavailable`` while the engine restarts.
        """
        async with self._changing_adapters:
            if name in self.adapters.paths and not replaces:
                raise InvalidParameter("lora_name", f"An adapter called '{name}' is loaded already.")
            async with self._awake_weights() as link:
                await self.adapters.load(link, name, path, content, alias, self._used_adapters)

    async def unload_adapter(self, name: str) -> None:
        """Reject new requests for an adapter, wait for its live ones, then unload it."""
        self.adapters.remove(name)
        while any(adapter_name(live.request.adapter) == name for live in self._live.values()):
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        async with self._changing_adapters:
            if self.adapters.retired and self._supervisor.link is not None:
                async with self._awake_weights() as link:
                    await self.adapters.unload_unused(link, self._used_adapters)

    async def prepare(self, link: EngineLink) -> None:
        """Load the previous process's adapters into a restarted engine process; drop those that fail to load."""
        if self._info is None:
            return  # the first process loads the configured adapters while it builds the engine
        self.adapters.take_unused(self._used_adapters)
        await self.adapters.load_all_again(link)
        for live in list(self._live.values()):
            try:
                self.adapters.check_loaded(live.request.adapter)
            except RequestError as error:
                self._fail(live, error)

    def _submit(self, live: LiveRequest) -> None:
        link = self._supervisor.link
        assert link is not None
        link.submit(live.replay())

    def _forget(self, live: LiveRequest) -> None:
        link = self._supervisor.link
        if live.is_submitted and link is not None:
            link.send(wire.Abort(link.generation, live.id))

    def _admit_waiting(self) -> None:
        """Submit the live requests that crash isolation now lets into the engine."""
        if self._isolation.holds_back and self._up is not None and not self._is_holding:
            for live in self._isolation.admit(self._live.values()):
                self._replay(live)

    def _replay(self, live: LiveRequest) -> None:
        if live.num_deaths:
            self.metrics.replays += 1
        try:
            self._submit(live)
        except wire.FrameError as error:
            self._fail(live, InvalidParameter("request", str(error)))

    # --- called by the supervisor ---

    def on_up(self, info: EngineInfo) -> None:
        """An engine process is ready: submit the live requests."""
        if self._info is not None and not self.sleep_level:
            self.metrics.restarts += 1
        now = time.monotonic()
        if self.is_waking:
            self.wake_seconds = now - self.since
        self.since = now
        self.sleep_level, self.is_waking = self.sleep_level if self.asleep else 0, False
        self._info = self.metrics.info = info
        if self.adapters.is_enabled:
            self._engine_settings["lora_modules"] = None  # ``prepare`` loads them into the next process
        self._has_engine, self.failure = True, None
        if self._next_version is not None:
            self._folder_version, self._next_version = self._next_version, None
        if self._holder != self._supervisor.generation and self.weight_version != self._folder_version:
            self._note_weights(self._folder_version)  # what was received is lost with the process
        self._admit_waiting()

    def on_down(self, is_from_outside: bool) -> None:
        """The engine process ended: fail requests found to be the cause; the others wait for the next process."""
        self._on_end()
        for live in self._isolation.on_death(self._live.values(), is_from_outside):
            self.metrics.poison_requests += 1
            logger.error("request %d ends: %d engine processes ended with it", live.id, live.num_deaths)
            self._fail(live, RequestFailed("The engine fails whenever it computes this request."))

    def _on_end(self) -> None:
        self._has_engine, self._cache_view = False, None
        self.metrics.hangs = self._supervisor.num_hangs
        for sink in self._kv_event_sinks:
            sink.clear()
        self.metrics.stats = self._total_stats.settle(self.stats)

    def on_failed_restart(self, reason: str, count: int) -> None:
        """An engine start failed: live requests keep waiting; from ``PATIENCE`` failures on, new ones are rejected.

        Where the folder of an update was deleted since, the next process has the first weights again.
        """
        if self._previous_model is not None:
            self._engine_settings["model"], self._previous_model = self._previous_model, None
            self._next_version, self._update_error = None, reason
        elif self._folder_version != FIRST_WEIGHTS and not Path(self._engine_settings["model"]).exists():
            self._engine_settings["model"], self._folder_version = self._first_model, FIRST_WEIGHTS
        elif count >= PATIENCE:
            self.failure = f"The engine cannot be restarted: {reason}"

    def on_step(self, step: wire.StepDone) -> None:
        """Apply one step's report, in a single pass over its outputs."""
        now = time.monotonic()
        self.metrics.observe_step(self._total_stats.total(step.stats))
        if step.cache_view is not None:
            self._cache_view = step.cache_view
        self.steps.note(step.stats, step.outputs, step.events, now)
        if step.events:
            self.timelines.add(step.events)
            self._note_computed(step.events)
        if step.kv_events:
            for sink in self._kv_event_sinks:
                sink.add(step.kv_events)
        for output in step.outputs:
            if (live := self._live.get(output.request_id)) is not None:
                self._deliver(live, output, now)
        for refusal in step.refusals:
            if (live := self._live.get(refusal.request_id)) is not None:
                live.is_submitted = False
                self._fail(live, refusal.as_error())
        self._admit_waiting()
