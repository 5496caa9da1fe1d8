"""Synthetic workloads: arrivals, prompt and output lengths, and follow-up turns."""

from __future__ import annotations

import math
import random
import sys
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo_fleet.sim.closed_loops import WORKLOADS as CLOSED
from octavo_fleet.sim.jobs import Awaits, Job, Lengths, Workload


class Profile(NamedTuple):
    """Distribution of one kind of conversation. One turn is a plain request."""

    shared: int
    """Tokens at the beginning of every prompt, the same for all sessions of an application."""
    first: Lengths
    """Prompt tokens of a first turn after the shared ones."""
    later: Lengths
    """Tokens that the user, or a tool, adds in a later turn."""
    output: Lengths
    turns: float = 1.0
    """Mean number of turns; geometric."""
    pause: float = 0.0
    """Mean seconds from an answer to the next turn; exponential."""
    applications: int = 1


PROFILES = {
    "single": Profile(0, Lengths(512, 0.8, 8192), Lengths(1), Lengths(192, 0.7, 2048)),
    "chat": Profile(256, Lengths(128, 1.0, 4096), Lengths(64, 0.8, 2048), Lengths(192, 0.7, 2048), 4.0, 20.0, 4),
    "agent": Profile(2048, Lengths(512, 0.8, 8192), Lengths(768, 1.0, 8192), Lengths(96, 0.6, 1024), 12.0, 2.0, 8),
    "summary": Profile(64, Lengths(4096, 0.5, 16_384), Lengths(1), Lengths(160, 0.4, 1024)),
    "sharegpt": Profile(0, Lengths(161, 1.0, 2048), Lengths(1), Lengths(338, 0.8, 2048)),
    "assistant": Profile(512, Lengths(161, 1.0, 2048), Lengths(1), Lengths(338, 0.8, 2048)),
    "fixed": Profile(0, Lengths(512), Lengths(1), Lengths(128)),
    "shared-prefix": Profile(1024, Lengths(128), Lengths(1), Lengths(128), applications=4),
    "multi-turn": Profile(0, Lengths(256), Lengths(64), Lengths(128), 5.0, 1.0),
}
"""``single`` shares nothing. ``chat``: people in conversations. ``agent``: long instructions, many short turns that
tools answer. ``summary``: long prompts. ``sharegpt``: mean lengths of the ShareGPT data set in "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023, figure 11). ``assistant``: the same lengths
after one system prompt that all requests share. ``fixed``, ``shared-prefix`` and
``multi-turn``: one property each, with constant lengths. Other figures are assumptions; flags or a recorded trace
replace them."""


class SessionWorkload:
    """Open-loop arrivals of conversations, at ``rate`` requests a second over all turns.

    Times between first turns are gamma distributed: ``burstiness`` 1 is Poisson, less is burstier, more is evener.
    The content of a conversation does not depend on when it is answered, so that fleets can be compared.

    With ``is_steady``, ``rate`` holds from the start on: there are conversations that began before, each of which
    has had an answer and pauses, or waits for the next one, which takes ``answer_seconds``. Without them, turns
    after pauses are missing at first, and with few requests the rate is never reached. Requests then come for
    ``num_requests / rate`` seconds, so that there are about ``num_requests``.
    """

    def __init__(
        self,
        profile: Profile,
        rate: float,
        num_requests: int,
        burstiness: float = 1.0,
        seed: int = 0,
        is_steady: bool = False,
        answer_seconds: float = 0.0,
    ) -> None:
        self.profile = profile
        self.mean_past_pause = profile.pause + answer_seconds
        self.until = num_requests / rate if is_steady and profile.turns > 1 else math.inf
        self.num_left = sys.maxsize if self.until < math.inf else num_requests
        self.mean_gap = profile.turns / rate
        self.burstiness = burstiness
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.next_text = 1 + profile.applications
        """Next unused token; each text has its own. A session's are consecutive: user, answer, user, answer."""
        self.num_sessions = 0
        self.num_past = 0
        if self.until < math.inf:  # by Little's law, and Poisson's number of them
            mean_paused = (profile.turns - 1) * self.mean_past_pause / self.mean_gap
            while (mean_paused := mean_paused - self.rng.expovariate(1.0)) > 0:
                self.num_past += 1

    @property
    def awaits(self) -> Awaits:
        return "session" if self.profile.turns > 1 else "none"

    def next_job(self) -> Job | None:
        if self.num_past:
            self.num_past -= 1
            return self._past()
        if self.num_left <= 0 or self.now > self.until:
            return None
        num_later = min(self._turns(), self.num_left - 1)
        self.num_left -= 1 + num_later
        rng, profile = self.rng, self.profile
        if self.mean_gap:  # else all come at once
            self.now += rng.gammavariate(self.burstiness, self.mean_gap / self.burstiness)
        if self.now > self.until:
            return None
        application = rng.randrange(profile.applications)
        shared = ((1 + application, profile.shared),) if profile.shared else ()
        text = self.next_text
        self.next_text += 2 * (1 + num_later)
        self.num_sessions += 1
        prompt = (*shared, (text, profile.first.draw(rng)))
        output = profile.output.draw(rng)
        return Job(self.now, prompt, output, text + 1, self.num_sessions, num_later, f"app{application}")

    def _past(self) -> Job:
        """The last answered turn of a conversation that pauses at the start. How many turns it has had, and will have
        after the next one, is geometric, whenever one looks."""
        rng, profile = self.rng, self.profile
        application, text = rng.randrange(profile.applications), self.next_text
        num_before, num_later = self._turns(), 1 + self._turns()
        self.next_text += 2 * (1 + num_before + num_later)
        self.num_sessions += 1
        prompt = ((1 + application, profile.shared),) if profile.shared else ()
        prompt = (*prompt, (text, profile.first.draw(rng)))
        for turn in range(num_before):
            answer = text + 2 * turn + 1
            prompt = (*prompt, (answer, profile.output.draw(rng)), (answer + 1, profile.later.draw(rng)))
        last, session = text + 2 * num_before + 1, self.num_sessions
        return Job(0.0, prompt, profile.output.draw(rng), last, session, num_later, f"app{application}", is_past=True)

    def _turns(self) -> int:
        """How many turns follow the first."""
        more = 0
        while self.rng.random() > 1 / self.profile.turns:
            more += 1
        return more

    def after(self, job: Job, now: float) -> Job | None:
        if not job.turns_left:
            return None
        profile = self.profile
        rng = random.Random(f"{self.seed} {job.session} {job.turns_left}")
        text = job.output_token + 1
        prompt = (*job.prompt, (job.output_token, job.output_len), (text, profile.later.draw(rng)))
        mean = self.mean_past_pause if job.is_past else profile.pause
        pause = rng.expovariate(1 / mean) if mean else 0.0
        output = profile.output.draw(rng)
        if now + pause > self.until:
            return None
        return Job(now + pause, prompt, output, text + 1, job.session, job.turns_left - 1, job.tenant)


class ClosedLoop:
    """``concurrency`` clients, each sending its next request when the last is done; lengths vary by ``spread``."""

    awaits: Awaits = "any"

    def __init__(
        self, num_requests: int, input_len: int, output_len: int, spread: float, concurrency: int, seed: int = 0
    ) -> None:
        self.num_left = num_requests
        self.lengths = (input_len, output_len)
        self.spread = spread
        self.num_to_start = concurrency
        self.rng = random.Random(seed)
        self.next_text = 1

    def next_job(self) -> Job | None:
        if not self.num_to_start:
            return None
        self.num_to_start -= 1
        return self._make(0.0)

    def after(self, job: Job, now: float) -> Job | None:
        return self._make(now)

    def _make(self, now: float) -> Job | None:
        if self.num_left <= 0:
            return None
        self.num_left -= 1
        shares = [1 + self.spread * self.rng.uniform(-1, 1) for _ in self.lengths]
        sizes = [max(1, round(length * share)) for length, share in zip(self.lengths, shares, strict=True)]
        text = self.next_text
        self.next_text += 2
        return Job(now, ((text, sizes[0]),), sizes[1], text + 1)


class WithinContext:
    """Wraps a workload so that requests fit into ``max_model_len``: a conversation that outgrows it ends."""

    def __init__(self, workload: Workload, max_model_len: int) -> None:
        self.workload = workload
        self.max_model_len = max_model_len

    @property
    def awaits(self) -> Awaits:
        return self.workload.awaits

    def _fits(self, job: Job) -> bool:
        return sum(count for _, count in job.prompt) + job.output_len <= self.max_model_len

    def next_job(self) -> Job | None:
        while (job := self.workload.next_job()) is not None:
            if self._fits(job):
                return job
        return None

    def after(self, job: Job, now: float) -> Job | None:
        following = self.workload.after(job, now)
        return following if following is not None and self._fits(following) else None


def find_profile(name: str, input_len: int | None = None, output_len: int | None = None) -> Profile:
    """The profile ``name``, with other mean lengths if given. Raises ``ConfigError``."""
    if name not in PROFILES:
        raise ConfigError(f"workload: {name!r} is not one of {', '.join([*PROFILES, *CLOSED])}")
    profile = PROFILES[name]
    if input_len:
        profile = profile._replace(first=profile.first._replace(mean=float(input_len)))
    if output_len:
        profile = profile._replace(output=profile.output._replace(mean=float(output_len)))
    return profile


def make_workload(
    name: str,
    num_requests: int,
    *,
    rate: float | None,
    burstiness: float = 1.0,
    concurrency: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    seed: int = 0,
    is_steady: bool = False,
    answer_seconds: float = 0.0,
) -> Workload:
    """The workload ``name``; given lengths override its own.

    A profile arrives at ``rate``, or as single turns in a closed loop of ``concurrency``; those of ``octavo bench`` are
    closed loops. Raises ``ConfigError``.
    """
    if name in CLOSED:
        load = CLOSED[name]
        prompt, output = input_len or load.input_len, output_len or load.output_len
        return ClosedLoop(num_requests, prompt, output, load.spread, concurrency or load.concurrency, seed)
    profile = find_profile(name, input_len, output_len)
    if concurrency is not None:
        prompt, output = round(profile.first.mean), round(profile.output.mean)
        return ClosedLoop(num_requests, prompt, output, 0.5, concurrency, seed)
    if rate is None:
        raise ConfigError(f"workload {name} needs --rate, in requests per second, or --concurrency")
    return SessionWorkload(profile, rate, num_requests, burstiness, seed, is_steady, answer_seconds)
