"""What a simulated client asks for."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple, Protocol

import msgspec

from octavo.sampling_params import SamplingParams
from octavo.types import Request

GREEDY = SamplingParams(temperature=0, ignore_eos=True)

Segment = tuple[int, int]
"""A text nobody reads: one token, repeated so many times. Texts are equal where their tokens are."""


class Job(msgspec.Struct, gc=False):
    """A request that is to come."""

    arrival: float
    """Seconds from the beginning."""
    prompt: tuple[Segment, ...]
    output_len: int
    output_token: int
    """What it generates, over and over."""
    session: int = 0
    turns_left: int = 0
    tenant: str = ""

    def tokens(self) -> list[int]:
        """The prompt."""
        made: list[int] = []
        for token, count in self.prompt:
            made += [token] * count
        return made

    def request(self, request_id: int, arrival: float, tokens: list[int]) -> Request:
        """What the engine gets to see of it; ``tokens`` is the prompt."""
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
    """How long texts are: lognormal with mean ``mean`` and shape ``sigma``, at most ``most``; 0 for all equal."""

    mean: float
    sigma: float = 0.0
    most: int = 32_768

    def draw(self, rng: random.Random) -> int:
        if not self.sigma:
            return max(1, round(self.mean))
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma))))


Awaits = Literal["nobody", "session", "anybody"]
"""Whose answers a job may wait for, or look like: nobody's, those of earlier turns of its session, or anybody's."""


class Workload(Protocol):
    """Where jobs come from. Each is made when it is due, so that memory does not grow with their number."""

    @property
    def awaits(self) -> Awaits: ...

    def next_job(self) -> Job | None:
        """The next in the order of arrival of those that come by themselves; ``None`` when that was all."""
        ...

    def after(self, job: Job, now: float) -> Job | None:
        """What follows when ``job`` has ended at ``now``, seconds from the beginning, if anything."""
        ...
