"""What a flood does to everybody else, under each policy."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config import SchedulerSettings
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from tests.engine.virtual import StepCost, VirtualEngine, VirtualProgress

SECONDS = 8.0
START = 1.0
COST = StepCost()
HALF_SPEED = StepCost(2 * COST.base, 2 * COST.per_token, 2 * COST.per_sequence)
"""A fair share of two, by generalised processor sharing: a device of one's own that is half as fast."""


@dataclass(frozen=True)
class TenantLoad:
    """Requests of one tenant: how many a second, and how long."""

    tenant: str
    rate: float
    prompt: int
    output: int

    def requests(self, first_id: int, seed: int) -> list[Request]:
        """Poisson arrivals; each prompt is its own."""
        rng = random.Random(seed)
        made: list[Request] = []
        now = START
        while (now := now + rng.expovariate(self.rate)) < START + SECONDS:
            number = first_id + len(made)
            params = SamplingParams(max_tokens=self.output, temperature=0, ignore_eos=True)
            prompt = [number + 2000, *range(self.prompt - 1)]
            made.append(Request(number, prompt, params, self.output, arrival=now, tenant=self.tenant))
        return made


QUIET = TenantLoad("quiet", 1.0, 256, 64)
FLOOD = TenantLoad("flood", 100.0, 256, 64)
FLOOD_OF_LONG_PROMPTS = TenantLoad("flood", 100.0, 4096, 64)


def share_of(progress: dict[int, VirtualProgress], tenant: str) -> dict[str, float]:
    """Mean seconds to the first token, and mean tokens per second of each request, of what ``tenant`` finished."""
    own = [one for one in progress.values() if one.request.tenant == tenant]
    ended = [one for one in own if len(one.token_times) == one.request.max_tokens]
    if not ended:
        return {"requests": len(own), "finished": 0, "ttft": math.inf, "tokens_per_second": 0.0}
    speeds = [len(one.token_times) / (one.token_times[-1] - one.request.arrival) for one in ended]
    return {
        "requests": len(own),
        "finished": len(ended),
        "ttft": statistics.fmean(one.ttft for one in ended),
        "tokens_per_second": statistics.fmean(speeds),
    }


def serve(policy: str, loads: Sequence[TenantLoad], cost: StepCost = COST, **settings: Any) -> VirtualEngine:
    """Serve ``loads`` together until the last of them has come; ``settings`` are the scheduler's."""
    engine = VirtualEngine(SchedulerSettings(scheduling_policy=policy, **settings), cost=cost)
    requests = [one for index, load in enumerate(loads) for one in load.requests(index * 100_000, index)]
    engine.serve(requests, until=START + SECONDS)
    return engine


def measure(policies: Sequence[str], flood: TenantLoad = FLOOD, **settings: Any) -> list[dict[str, Any]]:
    """A row for the fair share itself, then one for each policy: what the quiet tenant gets, and what all do."""
    rows = [_row("alone, at half the speed", serve("fcfs", [QUIET], HALF_SPEED))]
    return rows + [_row(policy, serve(policy, [QUIET, flood], **settings)) for policy in policies]


def _row(name: str, engine: VirtualEngine) -> dict[str, Any]:
    quiet = share_of(engine.progress, QUIET.tenant)
    total = sum(len(one.token_times) for one in engine.progress.values())
    return {
        "policy": name,
        "quiet_ttft_ms": round(quiet["ttft"] * 1e3, 1) if quiet["finished"] else None,
        "quiet_tokens_per_second": round(quiet["tokens_per_second"], 1),
        "quiet_finished": f"{quiet['finished']:.0f} of {quiet['requests']:.0f}",
        "all_tokens_per_second": round(total / SECONDS, 1),
        "preemptions": engine.engine.stats().num_preemptions,
    }
