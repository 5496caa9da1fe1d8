"""Event loop of one or several replicas, in the order of virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from octavo_fleet.routing.routers import BLIND, Router
from octavo_fleet.sim.client_metrics import RequestProgress
from octavo_fleet.sim.clock import START
from octavo_fleet.sim.jobs import Awaits, Job, Workload
from octavo_fleet.sim.replica import Arrival, Replica

NEVER = float("inf")
LEAST_TOKENS = 256
"""Of a prompt, beyond what a replica has cached, that is computed apart."""


class Transfer(NamedTuple):
    """What it takes to send a prompt's keys and values to another replica."""

    seconds: float
    seconds_per_token: float


NO_TRANSFER = Transfer(0.0, 0.0)


class Handover(NamedTuple):
    """A job whose prompt was computed, on its way to the replica that goes on with it."""

    job: Job
    sent: float
    """When its client sent it."""
    replica: Replica
    num_tokens: int
    """Whose keys and values that replica did not have then."""


class Events:
    """Arrivals of jobs and ends of steps; at equal times, steps come first, and jobs arrive together.

    The first ``num_prefill`` replicas compute long prompts for the others.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        workload: Workload,
        num_prefill: int = 0,
        transfer: Transfer = NO_TRANSFER,
    ) -> None:
        self._prefill, self.replicas = replicas[:num_prefill], replicas[num_prefill:]
        self._transfer = transfer
        self._apart: dict[int, Handover] = {}
        """The jobs whose prompts are being computed apart, by request id."""
        self.router = router
        self.workload = workload
        self._num_requests = 0
        self._awake: list[tuple[float, int, Replica]] = []
        """Heap of the replicas with work, by the time of their next event."""
        self._due: list[tuple[float, int, Job | Handover]] = []
        """Heap of follow-up jobs and of handovers, by arrival time."""
        self._coming: Job | None = None

    def advance(self, until: float = NEVER) -> None:
        """Process all events before ``until``, in virtual seconds."""
        awake = self._awake
        while True:
            arrival = self._next_arrival()
            if awake and awake[0][0] <= arrival:
                if awake[0][0] >= until:
                    return
                now, _, replica = heapq.heappop(awake)
                self._look_at(replica, now)
            elif arrival < until:
                while self._next_arrival() == arrival:
                    self._send(self._take_job(), arrival)
            else:
                return

    def _next_arrival(self) -> float:
        if self._coming is None:
            self._coming = self.workload.next_job()
        coming = self._coming.arrival + START if self._coming is not None else NEVER
        return min(coming, self._due[0][0]) if self._due else coming

    def _take_job(self) -> Job | Handover:
        coming = self._coming
        if coming is None or (self._due and self._due[0][0] <= coming.arrival + START):
            return heapq.heappop(self._due)[2]
        self._coming = None
        return coming

    def _send(self, job: Job | Handover, now: float) -> None:
        if isinstance(job, Handover):
            tokens, size = job.job.tokens(), job.replica.cache.block_size
            job.replica.remember(job.job, tokens[: (len(tokens) - 1) // size * size])
            self._add(job.replica, job.job, now, job.sent)
            return
        if job.is_past:  # of which routers that look at loads know nothing
            is_blind = isinstance(self.router, tuple(BLIND.values()))
            index = job.session % len(self.replicas)
            past = self.router.choose(Arrival(job), self.replicas) if is_blind else self.replicas[index]
            past.remember(job, [*job.tokens(), *[job.output_token] * job.output_len])
            self._follow(job, now)
            return
        arrival = Arrival(job)
        replica = self.router.choose(arrival, self.replicas)
        if self._prefill and (num_missing := replica.num_missing(arrival)) >= LEAST_TOKENS:
            first = self.router.choose(arrival, self._prefill)
            if self._add(first, msgspec.structs.replace(job, output_len=1), now):
                self._apart[self._num_requests] = Handover(job, now, replica, num_missing)
        else:
            self._add(replica, job, now)

    def _add(self, replica: Replica, job: Job, now: float, sent: float | None = None) -> bool:
        self._num_requests += 1
        is_added = replica.add(self._num_requests, job, now, sent)
        if not is_added:
            self._follow(job, now)
        elif not replica.is_awake:
            replica.is_awake = True
            heapq.heappush(self._awake, (now, replica.number, replica))
        return is_added

    def _look_at(self, replica: Replica, now: float) -> None:
        """A step has ended, or the next one must be scheduled: deliver the outputs, then run the next step."""
        done = replica.deliver(now)
        if done:
            for progress in done:
                self._end(progress, now)
            while self._due and self._due[0][0] <= now:  # an immediate follow-up joins the next step
                self._send(heapq.heappop(self._due)[2], now)
        again = replica.step(now)
        if replica.is_awake:
            heapq.heappush(self._awake, (again, replica.number, replica))

    def _end(self, progress: RequestProgress, now: float) -> None:
        """A request has ended: a conversation goes on, or the replica that waits for a prompt gets it."""
        handed = self._apart.pop(progress.request_id, None)
        if handed is None:
            self._follow(progress.job, now)
            return
        self._num_requests += 1
        there = now + self._transfer.seconds + handed.num_tokens * self._transfer.seconds_per_token
        heapq.heappush(self._due, (there, self._num_requests, handed))

    def _follow(self, job: Job, now: float) -> None:
        following = self.workload.after(job, now - START)
        if following is not None:
            self._num_requests += 1
            heapq.heappush(self._due, (following.arrival + START, self._num_requests, following))


class Inbox:
    """The queued jobs of one replica, a ``Workload`` whose follow-up jobs come from the original workload."""

    awaits: Awaits = "session"

    def __init__(self, workload: Workload) -> None:
        self.jobs: deque[Job] = deque()
        self.after = workload.after

    def next_job(self) -> Job | None:
        return self.jobs.popleft() if self.jobs else None
