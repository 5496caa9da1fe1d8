"""One rate of requests on a running server, for some seconds: which of them were answered in time.

Run as ``python -m octavo_bench.serving.probe``, it is one of the clients that share a load: each line of its input is a
``Probe`` as JSON, which it answers with a line.

A probe takes less time than a long answer, and a server that has just begun has less to do than the rate will bring.
So each probe begins with the requests that would be under way (``backlog``), each with what would be left of its
answer, and ends without waiting for the last ones, which are judged by what they got.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from octavo.errors import ConfigError
from octavo_bench.serving.http_client import HttpClient, TimedAnswer
from octavo_bench.serving.serve_figures import is_within
from octavo_bench.serving.serve_load import Prompts, ServeWork, Target
from octavo_fleet.sim.closed_loops import WORKLOADS as CLOSED
from octavo_fleet.sim.jobs import Job
from octavo_fleet.sim.workloads import Profile, SessionWorkload, WithinContext, find_profile

FILL_SHARE = 2 / 3
"""Of the time before the first judged request, in which the backlog is sent."""
LOOK_SECONDS = 0.1
"""How often it is seen whether the probe is lost already."""


class Probe(msgspec.Struct, frozen=True):
    """What one client sends, and when."""

    target: Target
    model: str
    work: ServeWork
    backlog: int
    """Requests that are under way at the beginning."""
    rate: float
    """Requests a second. 0: only the backlog, each of which is followed by the next when it ends."""
    lead: float
    """Seconds before the first request that is judged."""
    seconds: float
    """How long requests arrive that are judged."""
    grace: float
    """Seconds that the last of these get."""
    limits: dict[str, float]
    """Milliseconds by metric, as in ``serve_figures``."""
    max_late: int
    """The probe ends when more requests than these are outside the limits."""
    salt: str
    """The system prompts are the same for equal salts."""
    first_text: int
    """All other texts are new where this differs."""

    @property
    def ends(self) -> float:
        return self.lead + self.seconds + self.grace


class Probed(msgspec.Struct):
    """What came of it."""

    answers: list[TimedAnswer]
    """Of the requests that are judged; of a closed loop, all."""
    num_tokens: float
    """Output tokens of all requests in ``seconds`` seconds."""
    seconds: float
    """How long requests arrived that are judged; less where the probe ended early."""


class Due(NamedTuple):
    """A request, when it is sent, and whether it is judged."""

    at: float
    job: Job
    is_judged: bool


def profile_of(work: ServeWork) -> Profile:
    """The lengths of a workload of single requests. Raises ``ConfigError`` for others."""
    if work.workload in CLOSED:
        raise ConfigError(f"workload: {work.workload} is a closed loop; the search needs another, such as assistant")
    profile = find_profile(work.workload, work.input_len, work.output_len)
    if profile.turns > 1:
        raise ConfigError(f"workload: {work.workload} has conversations; the search needs another, such as assistant")
    return profile


def arrivals(probe: Probe) -> Iterator[Due]:
    """The backlog and the requests of the rate, each in order of time.

    As many requests arrive as the rate says, at the times of a Poisson process that has so many: its gaps, scaled.
    """
    profile, rng = profile_of(probe.work), random.Random(probe.work.seed)
    count = round(probe.rate * probe.ends)
    sessions = SessionWorkload(profile, 1.0, count + 1 + probe.backlog, seed=probe.work.seed)
    sessions.next_text += probe.first_text
    jobs = WithinContext(sessions, probe.work.max_model_len)
    made = [job for _ in range(count + 1 + probe.backlog) if (job := jobs.next_job()) is not None]
    backlog, arriving = made[: probe.backlog], made[probe.backlog :]
    output = profile.output
    longer = output._replace(mean=output.mean * math.exp(output.sigma**2))  # long answers stay longer
    for number, job in enumerate(backlog):
        job.output_len = max(1, round(longer.draw(rng) * rng.random()))
        yield Due(FILL_SHARE * probe.lead * number / len(backlog), job, False)
    first = backlog[-1].arrival if backlog else 0.0
    scale = probe.ends / (arriving[-1].arrival - first)
    for job in arriving[:-1]:
        at = (job.arrival - first) * scale
        yield Due(at, job, probe.lead <= at < probe.lead + probe.seconds)


class ProbeClient:
    """The requests of one probe."""

    def __init__(self, probe: Probe) -> None:
        target = probe.target
        self.probe = probe
        self.http = HttpClient(target.url, target.endpoint, target.api_key, target.timeout)
        self.prompts = Prompts(target.endpoint, probe.model, target.vocab_size, target.extra_body, probe.salt)
        self.judged: list[TimedAnswer] = []
        self.others: list[TimedAnswer] = []

    async def run(self) -> Probed:
        """Send the requests until the probe ends, or is lost."""
        begun = time.perf_counter()
        run = self._open_loop(begun) if self.probe.rate else self._closed_loop()
        sending = asyncio.create_task(run)
        while (now := time.perf_counter()) < begun + self.probe.ends and self._num_late(now) <= self.probe.max_late:
            if sending.done():
                await sending  # which raises what it ended with
            await asyncio.sleep(min(LOOK_SECONDS, begun + self.probe.ends - now))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        self.http.close()
        return self._probed(begun, now)

    async def _open_loop(self, begun: float) -> None:
        dues = sorted(arrivals(self.probe), key=lambda due: due.at)
        async with asyncio.TaskGroup() as tasks:
            for due in dues:
                await asyncio.sleep(begun + due.at - time.perf_counter())
                kept = self.judged if due.is_judged else self.others
                tasks.create_task(self.http.ask(self.prompts.body(due.job, {}), kept))
            await asyncio.Event().wait()

    async def _closed_loop(self) -> None:
        sessions = SessionWorkload(profile_of(self.probe.work), 1.0, 1 << 30, seed=self.probe.work.seed)
        sessions.next_text += self.probe.first_text
        jobs = WithinContext(sessions, self.probe.work.max_model_len)

        async def keep_asking() -> None:
            while (job := jobs.next_job()) is not None:
                if (await self.http.ask(self.prompts.body(job, {}), self.judged)).error is not None:
                    await asyncio.sleep(LOOK_SECONDS)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.probe.backlog):
                tasks.create_task(keep_asking())

    def _num_late(self, now: float) -> int:
        """Judged requests of which it is certain that they are outside the limits."""
        return sum(self._is_late(answer, now) for answer in self.judged)

    def _is_late(self, answer: TimedAnswer, now: float) -> bool:
        if answer.error is not None:
            return True
        if answer.times and not answer.ended:
            return not is_within(answer, {"ttft": self.probe.limits.get("ttft", float("inf"))})
        return not is_within(answer, self.probe.limits) if answer.ended else self._waits_too_long(answer, now)

    def _waits_too_long(self, answer: TimedAnswer, now: float) -> bool:
        return not answer.times and 1e3 * (now - answer.sent) > self.probe.limits.get("ttft", float("inf"))

    def _probed(self, begun: float, now: float) -> Probed:
        """What was seen until ``now``; requests of which nothing can be said yet are left out."""
        start = begun + (self.probe.lead if self.probe.rate else 0.0)
        end = min(now, start + self.probe.seconds) if self.probe.rate else now
        known = []
        for answer in (*self.judged, *self.others):
            answer.num_output = answer.num_output or len(answer.times)
        tokens = sum(_tokens_between(answer, start, end) for answer in (*self.judged, *self.others))
        for answer in self.judged:
            if not answer.ended and not answer.times and answer.error is None:
                if not self._waits_too_long(answer, now):
                    continue
                answer.error = f"no token within {1e3 * (now - answer.sent):.0f} ms"
            answer.pieces, answer.token_ids = [], []
            known.append(answer)
        return Probed(known, tokens, max(end - start, 0.0))


def _tokens_between(answer: TimedAnswer, start: float, end: float) -> float:
    """Output tokens that arrived in this time; each event has as many as the others of the answer."""
    events = sum(start <= at < end for at in answer.times)
    return events * answer.num_output / len(answer.times) if events else 0.0


def main() -> None:
    """Answer probes until the input ends, all on one event loop: a second loop of uvloop cuts its output short."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    print(json.dumps({"client": "octavo_bench.serving.probe"}), flush=True)
    with asyncio.Runner(loop_factory=factory) as runner:
        for line in sys.stdin:
            try:
                probed = runner.run(ProbeClient(msgspec.json.decode(line, type=Probe)).run())
                said = msgspec.json.encode(probed).decode()
            except Exception as error:
                said = json.dumps({"error": repr(error)[:500]})
            print(said, flush=True)


if __name__ == "__main__":
    main()
