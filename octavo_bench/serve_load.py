"""Load on a running server: a closed loop of clients, or arrivals at a rate, with the workloads of the simulator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError
from octavo_bench.http_client import Endpoint, TimedAnswer
from octavo_bench.infer_workloads import SERVING, Arrivals, Load
from octavo_fleet.sim.closed_loops import WORKLOADS as CLOSED
from octavo_fleet.sim.jobs import Job, Workload
from octavo_fleet.sim.workloads import Sessions, WithinContext, find_profile, make_workload

LEAST_GROWTH = 1.05
"""A sweep ends when twice the load gives less than this many times the throughput."""
MAX_LOADS = 14
"""Most loads of a sweep: the last is 8,192 times the first."""
Send = Callable[[Job, dict[int, TimedAnswer]], Awaitable[TimedAnswer]]


@dataclass(frozen=True)
class Target:
    """The server and how it is asked."""

    url: str
    endpoint: Endpoint = "completions"
    model: str | None = None
    """Default: the first that the server lists."""
    api_key: str | None = None
    vocab_size: int = 20_000
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    """Seconds that a request may take."""


@dataclass(frozen=True)
class ServeWork:
    """What is sent under each load. Equal seeds give equal lengths and times."""

    workload: str
    num_prompts: int
    """Of the workloads in ``SERVING``, 0 stands for their own numbers."""
    burstiness: float = 1.0
    input_len: int | None = None
    output_len: int | None = None
    seed: int = 0
    max_model_len: int = 1 << 30

    def jobs(self, load: Load) -> Workload:
        """The requests, of which those that the model's context is too short for are left out. Raises ``ConfigError``.

        In a closed loop a client has one conversation after the other, without pauses.
        """
        made: Workload
        if self.workload in SERVING:
            return WithinContext(Arrivals(SERVING[self.workload], self.num_prompts, self.seed), self.max_model_len)
        if self.workload in CLOSED:
            if load.rate is not None:
                raise ConfigError(f"workload: {self.workload} is a closed loop; --request-rate needs another")
            made = make_workload(
                self.workload,
                self.num_prompts,
                rate=None,
                concurrency=load.concurrency,
                input_len=self.input_len,
                output_len=self.output_len,
                seed=self.seed,
            )
        else:
            profile = find_profile(self.workload, self.input_len, self.output_len)
            if load.rate is None:
                profile = profile._replace(pause=0.0)
            made = Sessions(profile, load.rate or 1.0, self.num_prompts, self.burstiness, self.seed)
        return WithinContext(made, self.max_model_len)


async def apply(load: Load, jobs: Workload, send: Send) -> tuple[list[TimedAnswer], float]:
    """Send all ``jobs``; returns the answers, and the seconds from the first request to the last answer."""
    answers: list[TimedAnswer] = []
    start = time.perf_counter()

    async def converse(job: Job | None) -> None:
        """A job and those that follow it. A conversation ends with a failed answer."""
        told: dict[int, TimedAnswer] = {}
        while job is not None:
            await asyncio.sleep(start + job.arrival - time.perf_counter() if load.rate is not None else 0.0)
            answer = await send(job, told)
            answers.append(answer)
            told[job.output_token] = answer
            if answer.error is not None and job.turns_left:
                return
            job = jobs.after(job, time.perf_counter() - start)

    async def keep_asking() -> None:
        while (job := jobs.next_job()) is not None:
            await converse(job)

    async with asyncio.TaskGroup() as tasks:
        if load.rate is None:
            for _ in range(load.concurrency or 1):
                tasks.create_task(keep_asking())
        else:
            while (job := jobs.next_job()) is not None:
                await asyncio.sleep(start + job.arrival - time.perf_counter())
                tasks.create_task(converse(job))
    return answers, time.perf_counter() - start


def next_load(loads: Sequence[Load], throughputs: Sequence[float], num_prompts: int) -> Load | None:
    """The load of a sweep after those that were measured.

    ``None`` when more load gives no more throughput, or there are too few prompts for more clients.
    """
    if len(loads) >= MAX_LOADS:
        return None
    if len(loads) > 1 and throughputs[-1] < LEAST_GROWTH * throughputs[-2]:
        return None
    following = loads[-1].doubled()
    return None if (following.concurrency or 0) > num_prompts else following
