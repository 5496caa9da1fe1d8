"""Load on a running server: a closed loop of clients, or arrivals at a rate, with the workloads of the simulator, and
the five of github.com/paladin8/infer, by their names: numbers, arrivals and lengths of its page.

Request bodies have prompts of random tokens, or of random words, with the lengths asked for. A job's prompt is a list
of segments, each a number that stands for a text, and a length. Segments with the same number are the same text, which
is how prompts share prefixes; those that are answers are replaced by what the server said.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo_bench.serving.http_client import Endpoint, TimedAnswer
from octavo_fleet.sim.closed_loops import WORKLOADS as CLOSED
from octavo_fleet.sim.jobs import Awaits, Job, Workload
from octavo_fleet.sim.workloads import SessionWorkload, WithinContext, find_profile, make_workload

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """``concurrency`` clients that each send their next request after an answer, or ``rate`` requests a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate == math.inf:
            return "all at once"
        return f"concurrency {self.concurrency}" if self.rate is None else f"{self.rate:g} req/s"

    def doubled(self) -> Load:
        return Load(rate=2 * self.rate) if self.rate is not None else Load(2 * (self.concurrency or 1))


class Serving(NamedTuple):
    """``num_requests``, of which a share of ``long_share`` has prompts in ``long`` and the others in ``prompt``."""

    num_requests: int
    prompt: Bounds
    output: Bounds
    concurrency: int | None = None
    """Requests at a time; ``None``: they come at ``rate``."""
    rate: float | None = None
    """Requests a second, evenly; with neither, all at once."""
    is_poisson: bool = False
    long: Bounds = (0, 0)
    long_share: float = 0.0
    shared: int = 0
    """Tokens with which every prompt begins."""

    @property
    def load(self) -> Load:
        return Load(self.concurrency) if self.concurrency else Load(rate=self.rate or math.inf)


SERVING = {
    "baseline": Serving(10, (256, 256), (256, 256), concurrency=1),
    "continuous_batching": Serving(32, (64, 512), (64, 256), rate=4.0),
    "paged_attention": Serving(48, (128, 384), (128, 256)),
    "chunked_prefill": Serving(48, (64, 256), (64, 256), rate=6.0, is_poisson=True, long=(1024, 2048), long_share=0.75),
    "prefix_caching": Serving(48, (32, 128), (256, 256), rate=8.0, shared=1024),
}


class Arrivals:
    """The requests of one workload, in the order of their arrival."""

    awaits: Awaits = "none"

    def __init__(self, serving: Serving, num_requests: int | None, seed: int) -> None:
        self._serving = serving
        self._num_left = num_requests or serving.num_requests
        self._rng = random.Random(seed)
        self._now = 0.0
        self._text = 2

    def next_job(self) -> Job | None:
        """The next request; ``None`` after the last one."""
        if not self._num_left:
            return None
        self._num_left -= 1
        serving, rng, arrival = self._serving, self._rng, self._now
        if serving.rate is not None:
            self._now += rng.expovariate(serving.rate) if serving.is_poisson else 1 / serving.rate
        is_long = rng.random() < serving.long_share
        prompt = self._draw(serving.long if is_long else serving.prompt)
        shared = ((1, serving.shared),) if serving.shared else ()
        text, self._text = self._text, self._text + 2
        return Job(arrival, (*shared, (text, prompt)), self._draw(serving.output), text + 1)

    def _draw(self, bounds: Bounds) -> int:
        return self._rng.randint(*bounds)

    def after(self, job: Job, now: float) -> Job | None:
        return None


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
            made = SessionWorkload(profile, load.rate or 1.0, self.num_prompts, self.burstiness, self.seed)
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


COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city name president team minute idea body back "
    "parent face level office door health person art war history party result change morning reason research girl "
    "guy moment air teacher"
)
WORDS = COMMON.split()
"""One token each in most vocabularies, with the space before it."""
FIRST_TOKEN = 20
"""Tokens below are special in many models."""


class Prompts:
    """Makes the bodies of requests for one model."""

    def __init__(self, endpoint: Endpoint, model: str, vocab_size: int, extra: dict[str, Any], salt: str) -> None:
        """``salt``: texts differ between salts. ``extra``: more fields of each body, which may replace others."""
        self.endpoint = endpoint
        self._fields = {"model": model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        self._extra = {"ignore_eos": True, **extra}
        self._vocabulary = range(min(FIRST_TOKEN, vocab_size // 2), vocab_size)
        self._salt = salt

    def body(self, job: Job, answers: dict[int, TimedAnswer]) -> dict[str, Any]:
        """The request of ``job``; ``answers`` to the earlier turns of its session, by ``output_token``."""
        if self.endpoint == "chat":
            asked = {"messages": self._messages(job, answers), "max_completion_tokens": job.output_len}
        else:
            asked = {"prompt": self._tokens(job, answers), "max_tokens": job.output_len}
            if job.turns_left:
                asked["return_token_ids"] = True
        return {**self._fields, **asked, **self._extra}

    def _tokens(self, job: Job, answers: dict[int, TimedAnswer]) -> list[int]:
        """The prompt as tokens. An answer whose tokens the server did not name is as long, but of other tokens."""
        tokens: list[int] = []
        for number, count in job.prompt:
            told = answers[number].token_ids if number in answers else []
            tokens += told or self._random(number).choices(self._vocabulary, k=count)
        return tokens

    def _messages(self, job: Job, answers: dict[int, TimedAnswer]) -> list[dict[str, str]]:
        messages: list[dict[str, str]] = []
        for number, count in job.prompt:
            if number in answers:
                messages.append({"role": "assistant", "content": answers[number].text})
                continue
            text = " ".join(self._random(number).choices(WORDS, k=count))
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += " " + text
            else:
                messages.append({"role": "user", "content": text})
        return messages

    def _random(self, number: int) -> random.Random:
        return random.Random(f"{self._salt} {number}")
