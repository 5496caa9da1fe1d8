"""A fleet of engines, a router before them, and clients: one queue of events in the order of virtual time.

What is decided in an engine is decided by ``octavo.engine`` and ``octavo.cache`` as they run in production, step by
step. No step is skipped or summed up: among n sequences that each generate L tokens, somebody comes or ends every
L / 2n steps, and somebody needs a block every few steps, so that there is next to nothing to sum up.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.config import CacheSettings, SchedulerSettings
from octavo.sim.clock import START
from octavo.sim.cost_model import CostModel
from octavo.sim.jobs import Job, Workload
from octavo.sim.replica import Replica, Sizes
from octavo.sim.report import Ledger, Targets
from octavo.sim.router import make_router


@dataclass(frozen=True)
class Fleet:
    """Engines of one kind."""

    cost: CostModel
    sizes: Sizes
    num_replicas: int = 1
    devices_per_replica: int = 1
    router: str = "least-loaded"
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)


class Simulation:
    """Serves ``workload`` to its end."""

    def __init__(self, fleet: Fleet, workload: Workload, targets: Targets) -> None:
        self.fleet = fleet
        self.workload = workload
        self.ledger = Ledger(targets)
        self.router = make_router(fleet.router)
        self.replicas = [
            Replica(number, fleet.sizes, fleet.cost, fleet.cache, fleet.scheduler)
            for number in range(fleet.num_replicas)
        ]
        self.num_refused = 0
        self._num_requests = 0
        self._awake: list[tuple[float, int]] = []
        """When each replica that has work is to be looked at: a heap."""
        self._due: list[tuple[float, int, Job]] = []
        """Jobs that follow others: a heap."""
        self._coming = workload.next_job()

    def run(self) -> dict[str, Any]:
        """Returns the figures of ``Ledger.figures`` and of the fleet."""
        with _without_collections():
            while True:
                arrival = self._next_arrival()
                if self._awake and self._awake[0][0] <= arrival:
                    now, number = heapq.heappop(self._awake)
                    self._look_at(self.replicas[number], now)
                elif arrival < float("inf"):
                    self._send(self._take_job(), arrival)
                    now = arrival
                else:
                    break
                if now >= self.ledger.timeline.next_at:
                    self._note_queue(now)
        return {**self.ledger.figures(), **self._fleet_figures()}

    def _next_arrival(self) -> float:
        coming = self._coming.arrival + START if self._coming is not None else float("inf")
        return min(coming, self._due[0][0]) if self._due else coming

    def _take_job(self) -> Job:
        coming = self._coming
        if coming is None or (self._due and self._due[0][0] < coming.arrival + START):
            return heapq.heappop(self._due)[2]
        self._coming = self.workload.next_job()
        return coming

    def _send(self, job: Job, now: float) -> None:
        tokens = job.tokens()
        replica = self.router.choose(tokens, self.replicas)
        self._num_requests += 1
        if not replica.add(self._num_requests, job, tokens, now):
            self.num_refused += 1
            self._follow(job, now)
        elif not replica.is_awake:
            replica.is_awake = True
            heapq.heappush(self._awake, (now, replica.number))

    def _look_at(self, replica: Replica, now: float) -> None:
        """A step has ended: tell what it brought, and take the next one."""
        if replica.news:
            for told in self.ledger.take(replica.news, replica.live, replica.previous, now):
                self._follow(told.job, now)
            replica.previous = now
            while self._due and self._due[0][0] <= now:  # who asks again at once is there for the next step
                self._send(heapq.heappop(self._due)[2], now)
        if not replica.engine.has_work:
            replica.news = []
            replica.is_awake = False
            return
        replica.news = replica.engine.step()
        replica.engine.take_events()  # nobody asks for them here, and they would pile up
        heapq.heappush(self._awake, (replica.clock.now, replica.number))

    def _follow(self, job: Job, now: float) -> None:
        following = self.workload.after(job, now - START)
        if following is not None:
            self._num_requests += 1
            heapq.heappush(self._due, (following.arrival + START, self._num_requests, following))

    def _note_queue(self, now: float) -> None:
        waiting = sum(len(replica.scheduler.waiting) for replica in self.replicas)
        running = sum(len(replica.scheduler.running) for replica in self.replicas)
        self.ledger.timeline.note(now, waiting, running)

    def _fleet_figures(self) -> dict[str, Any]:
        stats = [replica.engine.stats() for replica in self.replicas]
        seconds = self.ledger.ended_at - START
        num_devices = self.fleet.num_replicas * self.fleet.devices_per_replica
        device_hours = num_devices * seconds / 3600
        queries = sum(one.prefix_queries for one in stats)
        return {
            "refused": self.num_refused,
            "steps": sum(one.num_steps for one in stats),
            "preemptions": sum(one.num_preemptions for one in stats),
            "prefix_hit_rate": sum(one.prefix_hits for one in stats) / max(1, queries),
            "busy_share": sum(replica.runner.busy_seconds for replica in self.replicas)
            / max(1e-9, seconds * len(self.replicas)),
            "devices": num_devices,
            "device_hours": device_hours,
            "device_hours_per_million_output_tokens": 1e6 * device_hours / max(1, self.ledger.num_output_tokens),
        }


@contextmanager
def _without_collections() -> Iterator[None]:
    """Nothing here makes garbage in cycles, and walking millions of cached blocks to find none takes minutes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
