"""One engine of a simulated fleet: the real scheduler and cache over a simulated device."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from octavo.cache.kv_cache import KVCache
from octavo.cache.node import Edge
from octavo.cache.radix_tree import RadixTree
from octavo.config import CacheSettings, SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.timing.step_model import work_of
from octavo.engine.timing.step_times import REST
from octavo.errors import RequestError
from octavo.steps.limits import StateSize
from octavo.types import EngineStats, Masks, Output, Plan, Sampled, Sequence
from octavo_fleet.sim.client_metrics import LatencyTargets, Ledger, RequestProgress
from octavo_fleet.sim.clock import Clock
from octavo_fleet.sim.costs.cost_model import CostModel
from octavo_fleet.sim.jobs import Job


class ReplicaSizes(NamedTuple):
    """Sizes fixed when an engine is built."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    """Steps in flight."""
    states: StateSize | None = None
    """Pool of recurrent states, for models that have any."""


class Result(NamedTuple):
    """Result of a replica at the end of a simulation."""

    number: int
    ledger: Ledger
    stats: EngineStats
    busy_seconds: float


class Arrival:
    """An arriving job as routers see it; its tokens, and the edges of its blocks, are made once for all replicas."""

    def __init__(self, job: Job) -> None:
        self.session = job.session
        self.tenant = job.tenant
        self._job = job
        self._edges: list[Edge] = []

    @cached_property
    def tokens(self) -> list[int | None]:
        return list(self._job.tokens())

    def edge(self, tree: RadixTree, index: int) -> Edge:
        """The edge of block number ``index``, at most one more than was asked for before."""
        if index == len(self._edges):
            self._edges.append(tree.edge(self.tokens, index, ""))
        return self._edges[index]


class Replica:
    """An engine with its own clock, which is ahead of the event loop by at most the current step."""

    def __init__(
        self,
        number: int,
        sizes: ReplicaSizes,
        cost: CostModel,
        cache: CacheSettings,
        scheduler: SchedulerSettings,
        targets: LatencyTargets,
    ) -> None:
        self.number = number
        self.ledger = Ledger(targets)
        self.clock = Clock()
        self.runner = SimRunner(cost.of_replica(number), self.clock)
        self.cache = KVCache(
            sizes.num_blocks,
            sizes.block_size,
            cache.enable_prefix_caching,
            eviction=cache.eviction_policy,
            watermark=cache.kv_watermark,
            clock=self.clock,
            states=sizes.states,
        )
        if cache.enable_partial_reuse:
            self.cache.copy_slots = lambda *part: None  # its cost is negligible
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            settings=scheduler,
            clock=self.clock,
        )
        self.engine = Engine(self.scheduler, self.runner, depth=sizes.depth)
        self.live: dict[int, RequestProgress] = {}
        """Unfinished requests as their clients see them, by id."""
        self._num_live_of: Counter[str] = Counter()
        """Number of unfinished requests by tenant."""
        self.undelivered: list[Output] = []
        """Outputs of the current step, delivered when the event loop reaches its end."""
        self.previous = -1.0
        """Time of the last outputs."""
        self.is_awake = False

    def add(self, request_id: int, job: Job, now: float, sent: float | None = None) -> bool:
        """Accept a job that arrives at ``now``, and that its client sent at ``sent``, by default now; returns False if
        it can never be served."""
        self._note_queue(now)
        self.ledger.note_arrival(now)
        if not self.is_awake:
            self.clock.now = max(self.clock.now, now)
        try:
            self.engine.add(job.request(request_id, now, job.tokens()))
        except RequestError:
            self.ledger.num_refused += 1
            return False
        self.live[request_id] = RequestProgress(job, now if sent is None else sent, request_id)
        self._num_live_of[job.tenant] += 1
        return True

    def remember(self, job: Job, tokens: list[int]) -> None:
        """Cache the keys and values of ``tokens``, of the prompt of ``job`` or of all of it, if there is room."""
        seq, cache = Sequence(job.request(0, 0.0, tokens)), self.cache
        ends = cache.match(seq)
        if not cache.admits(seq, ends, len(tokens)):
            return
        cache.start(seq, ends, True, len(tokens))
        cache.note_filled(len(tokens) - seq.num_computed_tokens)
        seq.num_computed_tokens = len(tokens)
        if cache.states is not None and len(tokens) > cache.states.interval:
            cache.states.note_submitted(seq, (len(tokens) - 1) // cache.states.interval * cache.states.interval)
        cache.publish(seq, len(tokens))
        cache.release(seq)

    # --- what routers ask ---

    @property
    def num_live(self) -> int:
        return len(self.live)

    def num_live_of(self, tenant: str) -> int:
        return self._num_live_of[tenant]

    def num_cached_blocks(self, arrival: Arrival) -> int:
        tree = self.cache.groups[0].tree
        node = tree.root
        for index in range((len(arrival.tokens) - 1) // tree.block_size):
            child = node.children.get(arrival.edge(tree, index))
            if child is None:
                return index
            node = child
        return node.depth

    def num_missing(self, arrival: Arrival) -> int:
        """Prompt tokens that it would have to compute."""
        return len(arrival.tokens) - self.num_cached_blocks(arrival) * self.cache.block_size

    # --- steps ---

    def deliver(self, now: float) -> list[RequestProgress]:
        """The current step has ended: deliver its outputs. Returns the finished requests."""
        self._note_queue(now)
        if not self.undelivered:
            return []
        done = self.ledger.take(self.undelivered, self.live, self.previous, now)
        for told in done:
            self._num_live_of[told.job.tenant] -= 1
        self.previous = now
        self.undelivered = []
        return done

    def step(self, now: float) -> float:
        """Run the next step, if there is work and scheduling it cannot wait; returns the time of the next event."""
        self.clock.now = max(self.clock.now, now)
        self.is_awake = self.engine.has_work
        if self.is_awake:
            if (later := now + self.engine.spare_seconds()) > now:
                return later
            self.undelivered = self.engine.step()
            self.engine.take_events()  # unused here; discarded so that they do not accumulate
        return self.clock.now

    def _note_queue(self, now: float) -> None:
        if now >= self.ledger.timeline.next_at:
            self.ledger.timeline.note(now, len(self.scheduler.waiting), len(self.scheduler.running))

    def result(self) -> Result:
        return Result(self.number, self.ledger, self.engine.stats(), self.runner.busy_seconds)


DECIDING = 0.0002
"""Host seconds per step while the device computes another; without overlap they are part of the step's cost."""
NOTHING = Sampled([])
"""Result of an item that samples nothing; the scheduler only reads it."""


MAX_ANSWERS = 1024
"""Cache size, larger than the number of running requests."""


class Answers(dict[int, Sampled]):
    """Results by sampled token; immutable, so one object serves all steps of a request."""

    def __missing__(self, token: int) -> Sampled:
        if len(self) == MAX_ANSWERS:
            self.clear()
        made = self[token] = Sampled([token])
        return made


class SimRunner:
    """Executes steps one after another on ``clock``, each with the duration given by ``cost``.

    The token that a request samples is its seed: the workload chooses it, so that a later turn can repeat it.
    """

    def __init__(self, cost: CostModel, clock: Clock) -> None:
        self.cost = cost
        self.clock = clock
        self.free_at = 0.0
        """Time when the device has finished all submitted steps."""
        self.busy_seconds = 0.0
        self.answers = Answers()

    def submit(self, plan: Plan) -> SimStep:
        work = work_of(plan)
        if self.free_at <= self.clock.now:
            work = work._replace(idle=1, rested=int(self.clock.now - self.free_at >= REST))
        else:
            self.clock.now += DECIDING
        seconds = self.cost.seconds(work)
        self.free_at = max(self.free_at, self.clock.now) + seconds
        self.busy_seconds += seconds
        return SimStep(plan, self.free_at, self)


class SimStep:
    """A submitted step, done at ``done_at``."""

    __slots__ = ("done_at", "plan", "runner")
    is_started = True

    def __init__(self, plan: Plan, done_at: float, runner: SimRunner) -> None:
        self.plan = plan
        self.done_at = done_at
        self.runner = runner

    def sample(self, masks: Masks) -> list[Sampled]:
        clock, answers = self.runner.clock, self.runner.answers
        clock.now = max(clock.now, self.done_at)
        return [answers[item.seq.request.seed] if item.samples else NOTHING for item in self.plan]
