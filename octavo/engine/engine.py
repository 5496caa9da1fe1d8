"""The step loop: schedule, execute, commit."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Any

from octavo.cache.kv_events import KVEvent
from octavo.engine.cache_report import view_of
from octavo.engine.logits_processors import Processors, make_processors
from octavo.engine.protocols import Adapters, Grammars, Runner, Sleeper, SubmittedStep, WeightChanger
from octavo.engine.scheduler import Scheduler
from octavo.engine.timing.schedule_delay import ScheduleDelay
from octavo.errors import CANCELLATIONS, CheckpointError, InvalidParameter, ModelNotFound, RunnerError, Unavailable
from octavo.system.background_threads import ThreadGroup
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.request_events import Event
from octavo.types import (
    MEMORY_PARTS,
    DropTensors,
    EngineStats,
    JoinGroup,
    Masks,
    MemoryPart,
    Output,
    Plan,
    ReceiveTensors,
    Request,
    Sequence,
    TakeWeights,
    WeightOrder,
)

MAX_SESSIONS = 200
"""Most that are listed."""
_NO_GRAMMAR: Future[Any] = Future()
_NO_GRAMMAR.set_result(None)


class NoGrammars:
    """Structured output is disabled: no token is masked."""

    def prepare(self, request: Request) -> Future[Any]:
        raise InvalidParameter("grammar", "This engine does not do structured output.")

    def masks(self, plan: Plan) -> Masks:
        return {}


class NoAdapters:
    """LoRA is disabled."""

    def __contains__(self, name: str) -> bool:
        return False

    def load(self, name: str, path: str) -> None:
        raise CheckpointError("this engine takes no adapters; it needs enable_lora")

    def unload(self, name: str) -> None:
        pass


class Engine:
    """Runs requests to completion, one step at a time.

    ``depth`` is the most steps that may be in flight. With 2, the next step is scheduled while the device computes
    the current one; nothing else differs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        sleeper: Sleeper | None = None,
        weights: WeightChanger | None = None,
        depth: int = 1,
        threads: ThreadGroup | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.grammars: Grammars = grammars or NoGrammars()
        self.adapters: Adapters = adapters or NoAdapters()
        self.sleeper = sleeper
        """``None`` if the device's memory cannot be freed while the engine lives."""
        self.weights = weights
        """``None`` if the model's weights cannot be changed while the engine lives."""
        self.depth = depth
        self._threads = threads or ThreadGroup()
        """Those that use the device beside the steps."""
        weakref.finalize(self, self._threads.stop)
        self.in_flight: deque[tuple[Plan, SubmittedStep]] = deque()
        self.last_plan: Plan = []
        """What the last step computed; empty if it failed."""
        self.spare_time = ScheduleDelay()
        self._ended_at = 0.0
        """Time when the last step ended."""
        self.preparing: dict[int, tuple[Request, Future[Any], Processors | None, Future[None] | None]] = {}
        """Requests whose grammar is still compiling, or whose cached prefix is still being read from disk or fetched;
        they are not in the scheduler yet."""

        self.asleep = set[MemoryPart]()
        """Parts of the device's memory that are freed."""

    def add(self, request: Request) -> None:
        """Accept ``request``; raises ``RequestError`` if it could never be served, or while the engine sleeps."""
        if self.asleep:
            raise Unavailable("The model sleeps.")
        if request.adapter and request.adapter not in self.adapters:
            raise ModelNotFound(f"There is no adapter {request.adapter}.", param="model")
        processors = make_processors(request.params.extra_args, request.prompt_tokens)
        prefix = self.scheduler.prefetch(request)
        if request.params.grammar is None and prefix is None:
            self.scheduler.add(request).processors = processors
            return
        self.scheduler.check_servable(Sequence(request))
        grammar = _NO_GRAMMAR if request.params.grammar is None else self.grammars.prepare(request)
        self.preparing[request.id] = request, grammar, processors, prefix

    def abort(self, request_id: int) -> None:
        """End a request without further output; does nothing if no request has this id."""
        if self.preparing.pop(request_id, None) is None:
            self.scheduler.abort(request_id)

    def _add_prepared(self) -> list[Output]:
        """Add the prepared requests to the scheduler; returns an error output for each whose preparation failed."""
        outputs = []
        for request, grammar, processors, prefix in list(self.preparing.values()):
            if not grammar.done() or not (prefix is None or prefix.done()):
                continue
            del self.preparing[request.id]
            try:
                found = grammar.result()
                seq = self.scheduler.add(request)
                seq.grammar, seq.processors = found, processors
            except CANCELLATIONS:
                raise
            except BaseException as error:  # any error of the grammar library ends this request only
                outputs.append(Output(request.id, [], "error", error=f"the grammar {error}"))
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.scheduler.has_work or bool(self.preparing) or bool(self.scheduler.routes)

    def spare_seconds(self) -> float:
        """Seconds to delay ``step`` while the device is busy, so that requests arriving meanwhile join its plan.

        Not positive when ``step`` should be called now.
        """
        if not self.in_flight or not self.in_flight[0][1].is_started:
            return 0.0
        plan = self.in_flight[0][0]
        slack = self.spare_time.during(plan, self.scheduler.step_budget.prompt_seconds(plan))
        return self._ended_at + slack - self.scheduler.clock()

    def step(self) -> list[Output]:
        """Run one iteration: schedule, execute, commit. Returns the new outputs."""
        clock = self.scheduler.clock
        started = clock()
        runs_ahead = bool(self.in_flight)
        began = self._ended_at if runs_ahead else started
        refused = self._add_prepared() if self.preparing else []
        self.last_plan = []
        while len(self.in_flight) < self.depth and (plan := self.scheduler.schedule()):
            self.in_flight.append((plan, self.runner.submit(plan)))  # the forward pass starts; no wait
            self.scheduler.cache.note_submitted(plan)
        if not self.in_flight:
            return refused if self.scheduler.routes is None else refused + self.scheduler.routes.added([], waits=True)
        plan, pending = self.in_flight.popleft()
        masks = self.grammars.masks(plan)  # CPU work during the forward pass
        asked = clock()
        try:
            sampled = pending.sample(masks)  # the one place that waits for the device
        except RunnerError as error:
            self._ended_at = clock()
            return refused + self.scheduler.fail(plan, error)  # retried in parts; only the cause ends
        waited = clock() - asked
        outputs = self.scheduler.commit(plan, sampled)  # append tokens, free blocks, finish
        if self.scheduler.routes is not None:
            outputs = self.scheduler.routes.added(outputs, waits=not self.in_flight)
        self.last_plan = plan
        self._ended_at = clock()
        self.scheduler.note_step(plan, self._ended_at - began)
        if runs_ahead and pending.is_started:
            is_plain = self.scheduler.stats.step_tokens == len(plan)
            predicted = None if is_plain else self.scheduler.step_budget.prompt_seconds(plan)
            if is_plain or predicted is not None:
                self.spare_time.note(plan, started - began, waited, predicted)
        return refused + outputs

    def take_events(self) -> list[Event]:
        """Scheduling events of requests since the last call."""
        return self.scheduler.events.take()

    def take_kv_events(self) -> list[KVEvent]:
        """Blocks stored in and removed from the prefix cache since the last call; empty if KV events are disabled."""
        events = self.scheduler.cache.events
        return [] if events is None else events.take()

    def stats(self) -> EngineStats:
        """Gauges and counters as of now; O(1)."""
        stats = self.scheduler.snapshot()
        stats.num_waiting += len(self.preparing)
        return stats

    def cache_view(self) -> CacheView:
        """Who owns which KV block now, for the console."""
        return view_of(self.scheduler.cache, self.scheduler.holders)

    def save_idle(self) -> bool:
        """Save some of the prefix cache to disk while there is no work; return whether there is more to save."""
        offload = self.scheduler.cache.offload
        return offload is not None and offload.save_idle()

    def clear_cache(self) -> None:
        """Drop what the prefix cache holds of ended requests."""
        self.scheduler.cache.clear()

    def order_sessions(self, order: SessionOrder) -> SessionReport:
        """Do what is asked about sessions."""
        cache = self.scheduler.cache
        if order.action == "list":
            return SessionReport(cache.sessions.views(order.owner, MAX_SESSIONS))
        if order.action == "prefetch":
            return SessionReport(is_taken=cache.prefetch_session(order.owner or "", order.name))
        cache.forget_session(order.owner or "", order.name)
        return SessionReport()

    def load_weights(self, folder: str, files: SequenceOf[str] = ()) -> None:
        """Take the weights of a folder, or with "" those in use, with the tensors of ``files`` in place of its own.

        First all requests end. Each step is computed with one set of weights, and no key or value of the earlier ones
        is used later. Raises ``CheckpointError``, and then nothing is changed; after another error the engine must not
        be used.
        """
        if self.weights is None:
            raise CheckpointError("the weights of this engine cannot be changed while it lives")
        while self.has_work:
            self.step()
        self.weights.load(folder, files)
        self.scheduler.clear()
        if self.scheduler.cache.offload is not None:
            self.scheduler.cache.offload.identify(self.weights.identity)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the weights in memory, behind the steps that were begun. Raises ``CheckpointError``."""
        if self.weights is None:
            raise CheckpointError("the weights of this engine have no checksums, as they cannot be changed")
        return self.weights.checksums()

    def order_weights(self, order: WeightOrder) -> bool:
        """Do what a server's trainer asks for; return whether anything is still being received.

        Raises ``CheckpointError``, also for an earlier order whose work in the background failed.
        """
        if self.weights is None:
            raise CheckpointError("the weights of this engine cannot be changed while it lives")
        receiver = self.weights.receiver
        receiver.check()
        match order:
            case JoinGroup():
                receiver.join(order)
            case ReceiveTensors():
                receiver.receive(order)
            case DropTensors(leaves_group=leaves_group):
                receiver.drop(leaves_group)
            case TakeWeights(folder=folder):
                self.load_weights(folder, () if folder else receiver.files())
                receiver.drop(leaves_group=False)
        return receiver.is_busy

    def sleep(self) -> None:
        """Free the device's memory until ``wake``, once all requests have ended or were aborted.

        Raises ``RunnerError`` if that is not possible; the prefix cache is empty in any case.
        """
        if self.sleeper is None:
            raise RunnerError("this engine cannot free its memory while it lives")
        while self.has_work:
            self.step()
        if self.scheduler.cache.offload is not None:
            self.scheduler.cache.offload.save_all()
        self.scheduler.clear()
        self.sleeper.sleep()
        self.asleep = {*MEMORY_PARTS}

    def wake(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Undo ``sleep`` for some parts of the memory; after an error the engine must not be used."""
        if self.asleep.intersection(parts):
            assert self.sleeper is not None, "an engine woke that could not sleep"
            self.sleeper.wake(parts)
            self.asleep -= {*parts}

    def close(self) -> None:
        """End what is done beside the steps, such as compiling and capturing graphs, of which a piece that is under way
        ends first, and wait until pending blocks are saved to slower tiers. The engine must not be used afterwards."""
        self._threads.end()
        if self.scheduler.cache.offload is not None:
            self.scheduler.cache.offload.close()

    def check(self) -> None:
        """Assert all invariants between steps; for tests and debugging."""
        self.scheduler.check()
        num_in_flight = Counter(item.seq for plan, _ in self.in_flight for item in plan)
        for seq in [*self.scheduler.holders, *num_in_flight]:
            assert seq.num_in_flight == num_in_flight[seq], "steps in flight are miscounted"
        num_pending = Counter[Sequence]()
        for plan, _ in self.in_flight:
            for item in plan:
                end = item.settled_start + len(item.tokens) + len(item.drafts)
                assert item.seq.capacity >= end, "blocks were released while in flight"
                if not item.is_stale and item.samples:
                    num_pending[item.seq] += 1 + len(item.drafts)
        for seq in num_in_flight:
            assert seq.tokens.count(None) == num_pending[seq], "a pending token will never be sampled"
