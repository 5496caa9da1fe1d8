"""The engines of a Ray deployment as one ``EngineClient``.

Every live request is journaled here. When its replica dies, it is sent to another as prompt and output so far, with the
same seed; random numbers are keyed by position, so the client gets the same tokens and notices only a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import ServeConfig
from octavo.errors import CANCELLATIONS, InvalidParameter, RequestFailed, Unavailable
from octavo.sampling_params import SamplingParams
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.counts import Condition, Timing
from octavo.telemetry.metrics import Metrics
from octavo.types import MEMORY_PARTS, EngineInfo, EngineStats, FinishReason, KVTransfer, MemoryPart, Request
from octavo_fleet.ray.messages import AnswerPart, decode_answer, decode_info, decode_report, encode
from octavo_server.engines.engine_client import FIRST_WEIGHTS, OutputListener
from octavo_server.engines.engine_stats import summed
from octavo_server.engines.live_request import LiveRequest, adapters_of
from octavo_server.engines.lora_adapters import AdapterTable
from octavo_server.engines.request_table import RequestJournal
from octavo_server.observe.step_log import StepLog
from octavo_server.observe.timelines import KVEventRing, Timelines

MAX_MOVES = 5
"""A request that is lost this many times in a row without a new token ends with an error."""
LEAST_TOKENS = 256
"""Of a prompt that is computed apart."""
PAUSE_SECONDS = 0.2
"""Pause before a request is sent again, times the number of losses in a row."""

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("octavo.ray")


def _refused(message: str) -> Any:
    """A method that only raises ``Unavailable``."""

    async def refuse(*args: object, **named: object) -> None:
        raise Unavailable(message)

    return refuse


class FleetEngine(RequestJournal):
    """Sends requests to the replicas of a deployment of ``EngineReplica``, through its handle."""

    def __init__(
        self, config: ServeConfig, handle: DeploymentHandle, max_replicas: int, prefill: DeploymentHandle | None = None
    ) -> None:
        """``prefill`` is the handle of engines that compute long prompts for the others, if there are any."""
        super().__init__()
        self._prefill = prefill
        self._patience = config.server.engine_timeout
        self._max_replicas = max_replicas
        self.metrics = Metrics((config.server.served_model_name or config.model.model).partition(",")[0], config)
        self.metrics.condition = self._condition
        self.adapters = AdapterTable(config.model)
        self.timelines = Timelines()
        self.steps = StepLog()
        self.kv_events = KVEventRing()
        self.failure: str | None = None
        self.pid: int | None = None
        self.num_restarts = self.sleep_level = 0
        self.is_paused = False
        self.weight_version = FIRST_WEIGHTS
        self.has_received = False
        self.last_answer = time.monotonic()
        self._info: EngineInfo | None = None
        self._handle = handle
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stats: dict[str, EngineStats] = {}
        """The last statistics of every replica that ever answered: counters must not shrink."""

    async def start(self) -> None:
        """Wait for the first engine."""
        info = decode_info(await self._handle.info.remote())
        # Requests that wait are what makes Ray start further replicas, so there must be room for them.
        sequences = info.max_num_seqs * self._max_replicas
        self._info = self.metrics.info = msgspec.structs.replace(info, max_num_seqs=sequences)

    # --- state ---

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("no engine has answered yet")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Sums over all replicas, each as of its last answer; gauges of requests are those of this process."""
        stats = summed(self._stats.values())
        stats.num_running = sum(live.timing.first_token > 0 for live in self._live.values())
        stats.num_waiting = self.num_live - stats.num_running
        return stats

    @property
    def is_ready(self) -> bool:
        return self._info is not None

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since any engine answered while requests are live; 0 while idle."""
        return time.monotonic() - self.last_answer if self._live else 0.0

    def cache_views(self) -> list[CacheView]:
        """None: the replicas' caches are not viewed from here."""
        return []

    def set_pace(self, steps: int | None) -> None:
        """Raises ``Unavailable``."""
        raise Unavailable("Replicas of Ray do not go step by step.")

    async def wake_up(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Replicas are always awake."""

    def resume(self) -> None:
        """Replicas never pause."""

    sleep = _refused("Replicas of Ray do not sleep; its autoscaling ends idle ones.")
    pause = _refused("Replicas of Ray cannot be paused.")
    update_weights = order_weights = take_weights = _refused(
        "Replicas of Ray keep the weights that they began with; deploy the new ones."
    )
    weight_checksums = _refused("Replicas of Ray tell no checksums of their weights.")
    clear_prefix_cache = _refused("The prefix caches of Ray's replicas cannot be emptied.")

    def _condition(self) -> Condition:
        self.metrics.stats = self.stats
        return Condition(self.num_live, self.is_ready, self.seconds_since_progress, *adapters_of(self._live.values()))

    # --- requests ---

    def add(self, request: Request, listener: OutputListener) -> None:
        """Accept a request; ``listener`` is then guaranteed a final output or error, also when replicas die."""
        if self._info is None:
            raise Unavailable("No engine is ready yet.", retry_after=5)
        if not self._live:
            self.last_answer = time.monotonic()
        live = LiveRequest(request, listener, Timing(request.arrival or time.monotonic()))
        self._keep(live)
        task = self._tasks[live.id] = asyncio.create_task(self._serve(live))
        task.add_done_callback(lambda _: self._tasks.pop(live.id, None))

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """End a request without notifying its listener; an id that is not live is ignored."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, reason)
            self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        task = self._tasks.get(live.id)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _serve(self, live: LiveRequest) -> None:
        """Compute a request to its end, on one replica after another if need be."""
        num_losses = 0
        while live.id in self._live:
            num_tokens = len(live.tokens)
            try:
                await self._stream(live)
                reason = "its stream ended early"
            except CANCELLATIONS:
                raise
            except BaseException as error:  # whatever Ray raises for a replica, node or connection that is gone
                reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if live.id not in self._live:
                return
            num_losses = 1 if len(live.tokens) > num_tokens else num_losses + 1
            logger.warning("request %d is lost after %d tokens (%s)", live.id, len(live.tokens), reason)
            if num_losses > MAX_MOVES:
                self._fail(live, RequestFailed("The engines fail whenever they compute this request."))
                return
            live.num_deaths += 1
            self.metrics.replays += 1
            await asyncio.sleep(PAUSE_SECONDS * (num_losses - 1))

    async def _stream(self, live: LiveRequest) -> None:
        """Send the request with its output so far to a replica, and deliver what comes."""
        request = await self._after_prefill(live.replay())
        if live.id not in self._live:
            return
        answers = self._handle.options(stream=True).generate.remote(encode(request))
        try:
            async for data in answers:
                self._take(live, decode_answer(data))
                if live.id not in self._live:
                    return
        finally:
            answers.cancel()

    async def _after_prefill(self, request: Request) -> Request:
        """``request``, to go on from its prompt at the engine that has computed it, if it is a long one; as it was if
        that engine fails."""
        is_apart = request.task == "generate" and request.params.prompt_logprobs is None
        if self._prefill is None or not is_apart or len(request.prompt_tokens) < LEAST_TOKENS:
            return request
        first = msgspec.structs.replace(
            request, params=SamplingParams(), max_tokens=1, output_tokens=[], thinking=None, transfer=KVTransfer()
        )
        answers = self._prefill.options(stream=True).generate.remote(encode(first))
        transfer = None
        try:
            async with asyncio.timeout(self._patience):
                async for data in answers:
                    for output in decode_answer(data).outputs:
                        transfer = output.transfer or transfer
        except CANCELLATIONS:
            raise
        except BaseException as error:  # as in ``_serve``; the other engine computes the prompt, too
            logger.warning("the prompt of request %d is not computed apart: %s", request.id, type(error).__name__)
        finally:
            answers.cancel()
        return request if transfer is None else msgspec.structs.replace(request, transfer=transfer)

    def _take(self, live: LiveRequest, answer: AnswerPart) -> None:
        now = self.last_answer = time.monotonic()
        self._stats[answer.replica] = answer.stats
        for output in answer.outputs:
            if live.id not in self._live:
                return
            output.request_id = live.id
            if output.first_scheduled:
                output.first_scheduled += live.timing.arrival
            self._deliver(live, output, now)
        refusal = answer.refusal
        if refusal is not None and live.id in self._live:
            error = refusal.as_error()
            if isinstance(error, Unavailable):  # the replica shuts down
                raise error
            self._fail(live, error)

    async def order_sessions(self, order: SessionOrder) -> SessionReport:
        """What all replicas that are there answer. Raises ``Unavailable`` if none does."""
        handles = [self._handle] if self._prefill is None else [self._handle, self._prefill]
        asked = [handle.broadcast("order_sessions", encode(order)) for handle in handles]
        found = await asyncio.gather(
            *(each.results_async(timeout_s=self._patience, return_exceptions=True) for each in asked),
            return_exceptions=True,  # whatever Ray raises when a deployment has no replica
        )
        answers = [answer for each in found if isinstance(each, list) for answer in each if isinstance(answer, bytes)]
        if not answers:
            raise Unavailable("No engine answers now. Try again shortly.")
        return SessionReport.joined([decode_report(answer) for answer in answers])

    # --- adapters ---

    async def load_adapter(self, name: str, path: str, content: str, replaces: bool = False) -> None:
        raise InvalidParameter("lora_name", "A fleet on Ray serves the adapters of its setting lora_modules.")

    async def unload_adapter(self, name: str) -> None:
        raise InvalidParameter("lora_name", "A fleet on Ray serves the adapters of its setting lora_modules.")
