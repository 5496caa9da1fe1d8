"""Requests of simulated clients."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple, Protocol

import msgspec

from octavo.sampling_params import SamplingParams
from octavo.types import Request

GREEDY = SamplingParams(temperature=0, ignore_eos=True)

Segment = tuple[int, int]
"""Placeholder text: a token and how often it is repeated. Texts are equal where their tokens are."""


class Job(msgspec.Struct, gc=False):
    """A future request."""

    arrival: float
    """Seconds from the start."""
    prompt: tuple[Segment, ...]
    output_len: int
    output_token: int
    """The token that it generates repeatedly."""
    session: int = 0
    turns_left: int = 0
    tenant: str = ""
    is_past: bool = False
    """Whether it was answered before the start: it only fills the cache, and its conversation goes on."""

    def tokens(self) -> list[int]:
        """The prompt."""
        made: list[int] = []
        for token, count in self.prompt:
            made += [token] * count
        return made

    def request(self, request_id: int, arrival: float, tokens: list[int]) -> Request:
        """The engine's request for it; ``tokens`` is the prompt."""
        return Request(
            id=request_id,
            prompt_tokens=tokens,
            params=GREEDY,
            max_tokens=self.output_len,
            seed=self.output_token,
            arrival=arrival,
            session=str(self.session) if self.session else "",
            tenant=self.tenant,
        )


class Lengths(NamedTuple):
    """Lognormal text lengths with mean ``mean`` and shape ``sigma``, at most ``most``; constant if ``sigma`` is 0."""

    mean: float
    sigma: float = 0.0
    most: int = 32_768

    def draw(self, rng: random.Random) -> int:
        if not self.sigma:
            return max(1, round(self.mean))
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma))))


Awaits = Literal["none", "session", "any"]
"""Answers that a job may wait for or depend on: none, those of earlier turns of its session, or any."""


class Workload(Protocol):
    """Source of jobs. Each is created when it is due, so that memory does not grow with their number."""

    @property
    def awaits(self) -> Awaits: ...

    def next_job(self) -> Job | None:
        """The next independent job, in the order of arrival; ``None`` after the last one."""
        ...

    def after(self, job: Job, now: float) -> Job | None:
        """The follow-up, if any, of ``job``, which ended at ``now``, in seconds from the start."""
        ...
