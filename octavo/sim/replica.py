"""One engine of a simulated fleet: the real scheduler and cache over a device that takes its time."""

from __future__ import annotations

from typing import NamedTuple

from octavo.cache.kv_cache import KVCache
from octavo.config import CacheSettings, SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.errors import RequestError
from octavo.sim.clock import Clock
from octavo.sim.cost_model import CostModel
from octavo.sim.jobs import Job
from octavo.sim.report import Ledger, Targets, Told
from octavo.sim.runner import SimRunner
from octavo.types import EngineStats, Output


class Sizes(NamedTuple):
    """What an engine settles when it is built."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    """Steps in flight."""


class Result(NamedTuple):
    """What is left of a replica when all is done."""

    number: int
    ledger: Ledger
    stats: EngineStats
    busy_seconds: float


class Replica:
    """An engine with its own clock, which is ahead of events by at most the step it is in."""

    def __init__(
        self,
        number: int,
        sizes: Sizes,
        cost: CostModel,
        cache: CacheSettings,
        scheduler: SchedulerSettings,
        targets: Targets,
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
        )
        if cache.enable_partial_reuse:
            self.cache.copy_slots = lambda *part: None  # it costs next to nothing
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            settings=scheduler,
            clock=self.clock,
        )
        self.engine = Engine(self.scheduler, self.runner, depth=sizes.depth)
        self.live: dict[int, Told] = {}
        """Requests whose answers are not complete for their clients, by id."""
        self.news: list[Output] = []
        """What the step under way will have told when the clock gets there."""
        self.previous = -1.0
        """When outputs came last."""
        self.is_awake = False

    def add(self, request_id: int, job: Job, now: float) -> bool:
        """Take a job that comes at ``now``; says no when it could never be served."""
        self._note_queue(now)
        if not self.is_awake:
            self.clock.now = max(self.clock.now, now)
        try:
            self.engine.add(job.request(request_id, now, job.tokens()))
        except RequestError:
            self.ledger.num_refused += 1
            return False
        self.live[request_id] = Told(job, now)
        return True

    def tell(self, now: float) -> list[Told]:
        """The step under way is over: say what it brought. Returns who is done."""
        self._note_queue(now)
        if not self.news:
            return []
        done = self.ledger.take(self.news, self.live, self.previous, now)
        self.previous = now
        self.news = []
        return done

    def step(self, now: float) -> float:
        """Take the next step, if there is something to do and it need be decided ``now``; when to look at it again."""
        self.clock.now = max(self.clock.now, now)
        self.is_awake = self.engine.has_work
        if self.is_awake:
            if (later := now + self.engine.spare_seconds()) > now:
                return later
            self.news = self.engine.step()
            self.engine.take_events()  # nobody asks for them here, and they would pile up
        return self.clock.now

    def _note_queue(self, now: float) -> None:
        if now >= self.ledger.timeline.next_at:
            self.ledger.timeline.note(now, len(self.scheduler.waiting), len(self.scheduler.running))

    def result(self) -> Result:
        return Result(self.number, self.ledger, self.engine.stats(), self.runner.busy_seconds)
