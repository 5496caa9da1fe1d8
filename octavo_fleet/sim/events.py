"""Event loop of one or several replicas, in the order of virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from octavo_fleet.routing.routers import BLIND, Router
from octavo_fleet.sim.clock import START
from octavo_fleet.sim.jobs import Awaits, Job, Workload
from octavo_fleet.sim.replica import Arrival, Replica

NEVER = float("inf")


class Events:
    """Arrivals of jobs and ends of steps; at equal times, steps come first, and jobs arrive together."""

    def __init__(self, replicas: Sequence[Replica], router: Router, workload: Workload) -> None:
        self.replicas = replicas
        self.router = router
        self.workload = workload
        self._num_requests = 0
        self._awake: list[tuple[float, int, Replica]] = []
        """Heap of the replicas with work, by the time of their next event."""
        self._due: list[tuple[float, int, Job]] = []
        """Heap of follow-up jobs, by arrival time."""
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

    def _take_job(self) -> Job:
        coming = self._coming
        if coming is None or (self._due and self._due[0][0] <= coming.arrival + START):
            return heapq.heappop(self._due)[2]
        self._coming = None
        return coming

    def _send(self, job: Job, now: float) -> None:
        if job.is_past:  # of which routers that look at loads know nothing
            is_blind = isinstance(self.router, tuple(BLIND.values()))
            index = job.session % len(self.replicas)
            past = self.router.choose(Arrival(job), self.replicas) if is_blind else self.replicas[index]
            past.remember(job)
            self._follow(job, now)
            return
        replica = self.router.choose(Arrival(job), self.replicas)
        self._num_requests += 1
        if not replica.add(self._num_requests, job, now):
            self._follow(job, now)
        elif not replica.is_awake:
            replica.is_awake = True
            heapq.heappush(self._awake, (now, replica.number, replica))

    def _look_at(self, replica: Replica, now: float) -> None:
        """A step has ended, or the next one must be scheduled: deliver the outputs, then run the next step."""
        done = replica.deliver(now)
        if done:
            for progress in done:
                self._follow(progress.job, now)
            while self._due and self._due[0][0] <= now:  # an immediate follow-up joins the next step
                self._send(heapq.heappop(self._due)[2], now)
        again = replica.step(now)
        if replica.is_awake:
            heapq.heappush(self._awake, (again, replica.number, replica))

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
