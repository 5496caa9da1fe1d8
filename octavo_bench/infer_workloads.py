"""The five serving workloads of github.com/paladin8/infer, by their names: numbers, arrivals and lengths of its page.

Each has a load of its own. Lengths are drawn evenly between two bounds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from octavo_fleet.sim.jobs import Awaits, Job

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
