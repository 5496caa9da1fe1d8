"""A fleet of engines, a router before them, and clients.

All decisions are made by the production code of ``octavo.engine`` and ``octavo.cache``, step by step. Steps are never
skipped or merged: among n sequences that each generate L tokens, one starts or ends every L / 2n steps, and one needs a
block every few steps, so that hardly any steps could be merged.

If neither router nor workload couples the replicas, each is simulated for a while before the next one, so that its
state stays in the processor's caches. The figures are the same, since each replica sees the same events in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.config import CacheSettings, SchedulerSettings
from octavo.system.garbage_collection import without_collections
from octavo_fleet.routing.routers import BLIND, RoundRobinRouter, make_router
from octavo_fleet.sim.client_metrics import LatencyTargets, Ledger
from octavo_fleet.sim.clock import START
from octavo_fleet.sim.costs.cost_model import CostModel
from octavo_fleet.sim.event_loop import NEVER, NO_TRANSFER, Events, Inbox, Transfer
from octavo_fleet.sim.jobs import Workload
from octavo_fleet.sim.replica import Replica, ReplicaSizes, Result

TURN = 128
"""Mean number of jobs that a replica is given before the next one's turn."""


@dataclass(frozen=True)
class Fleet:
    """Engines of one kind."""

    cost: CostModel
    sizes: ReplicaSizes
    num_replicas: int = 1
    devices_per_replica: int = 1
    router: str = "least-loaded"
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    num_prefill: int = 0
    """The first replicas compute the long prompts of all others, which fetch their keys and values."""
    transfer: Transfer = NO_TRANSFER

    def separates(self, workload: Workload) -> bool:
        """Whether no replica affects another."""
        return not self.num_prefill and self.router in BLIND and workload.awaits in BLIND[self.router].separates


class Simulation:
    """Serves ``workload`` to its end.

    ``numbers`` are the replicas to simulate, by default all; a subset requires that the fleet ``separates`` them.
    """

    def __init__(
        self, fleet: Fleet, workload: Workload, targets: LatencyTargets, numbers: Sequence[int] | None = None
    ) -> None:
        self.fleet = fleet
        self.workload = workload
        self.replicas = [
            Replica(number, fleet.sizes, fleet.cost, fleet.cache, fleet.scheduler, targets)
            for number in (range(fleet.num_replicas) if numbers is None else numbers)
        ]

    def run(self) -> dict[str, Any]:
        """The figures of ``Ledger.figures`` and of the fleet."""
        return figures(self.fleet, self.results())

    def results(self) -> list[Result]:
        """Simulate; returns the result of each replica."""
        # No reference cycles are created here, and a garbage collection over millions of cached blocks takes minutes.
        with without_collections():
            if self.fleet.separates(self.workload):
                self.serve_independently()
            else:
                self.serve_together()
        return [replica.result() for replica in self.replicas]

    def serve_together(self) -> None:
        """All events in one queue."""
        fleet = self.fleet
        router = make_router(fleet.router)
        Events(self.replicas, router, self.workload, fleet.num_prefill, fleet.transfer).advance()

    def serve_independently(self) -> None:
        """A queue for each replica; all are advanced in rounds, one after another, to a common time."""
        inboxes: list[Inbox | None] = [None] * self.fleet.num_replicas
        queues = []
        for replica in self.replicas:
            inbox = inboxes[replica.number] = Inbox(self.workload)
            queues.append(Events([replica], RoundRobinRouter(), inbox))
        router = BLIND[self.fleet.router]()
        until = START
        while until < NEVER:
            for _ in range(TURN * len(inboxes)):
                job = self.workload.next_job()
                if job is None:
                    until = NEVER
                    break
                until = job.arrival + START
                chosen = router.choose(job, inboxes)
                if chosen is not None:  # else it is for a replica that is simulated elsewhere
                    chosen.jobs.append(job)
            for queue in queues:
                queue.advance(until)


def figures(fleet: Fleet, results: Sequence[Result]) -> dict[str, Any]:
    """Merged metrics of all replicas, and those of the fleet; ``results`` are in the order of the replicas."""
    ledger = Ledger()
    for one in results[fleet.num_prefill :]:
        ledger.merge(one.ledger)
    stats = [one.stats for one in results]
    seconds = ledger.ended_at - START
    num_devices = fleet.num_replicas * fleet.devices_per_replica
    device_hours = num_devices * seconds / 3600
    queries = sum(one.prefix_queries for one in stats)
    return {
        **ledger.figures(),
        "refused": ledger.num_refused,
        "steps": sum(one.num_steps for one in stats),
        "preemptions": sum(one.num_preemptions for one in stats),
        "prefix_hit_rate": sum(one.prefix_hits for one in stats) / max(1, queries),
        "busy_share": sum(one.busy_seconds for one in results) / max(1e-9, seconds * len(results)),
        "devices": num_devices,
        "device_hours": device_hours,
        "device_hours_per_million_output_tokens": 1e6 * device_hours / max(1, ledger.num_output_tokens),
    }
