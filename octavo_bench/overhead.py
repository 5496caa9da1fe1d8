"""What deciding costs: the engine's own time per step, with a runner that answers at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.protocols import Runner
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.types import Masks, Plan, Request, Sampled
from octavo_bench.records.report import spread

TOKEN = 1000
"""An ordinary token in any vocabulary, one that has a text."""
MAX_NUM_BATCHED_TOKENS = 8192
SPARE_STEPS = 64
"""Steps until all sequences decode, besides those of their prompts."""
NUM_TENANTS = 100


class InstantRunner:
    """A runner whose device takes no time: every sampled token is the same."""

    def submit(self, plan: Plan) -> InstantStep:
        return InstantStep(plan)


class InstantStep:
    """A step of it: already done."""

    is_started = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def sample(self, masks: Masks) -> list[Sampled]:
        return [Sampled([TOKEN] if item.samples and not item.is_stale else []) for item in self.plan]


def build_instant_engine(num_sequences: int, tokens: int, runner: Runner | None = None, policy: str = "fcfs") -> Engine:
    """An engine over an instant runner, or another one, with room for ``num_sequences`` of ``tokens`` tokens."""
    cache = KVCache(num_sequences * (tokens // 16 + 2), block_size=16)
    settings = SchedulerSettings(scheduling_policy=policy)
    scheduler = Scheduler(
        cache, max_num_seqs=num_sequences, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, settings=settings
    )
    return Engine(scheduler, runner or InstantRunner())


def step_milliseconds(
    num_sequences: int, prompt: int, steps: int, policy: str = "fcfs", num_waiting: int = 0, num_seen: int = 0
) -> list[float]:
    """Of each of ``steps`` steps in which all sequences decode a token, and others wait, after ``num_seen`` that came
    and went. It is processor time, so that other work on the machine counts little."""
    most = steps + num_sequences * prompt // MAX_NUM_BATCHED_TOKENS + SPARE_STEPS
    engine = build_instant_engine(num_sequences, prompt + most, policy=policy)
    params = SamplingParams(temperature=0, ignore_eos=True)
    for number in range(num_seen):
        engine.add(Request(number, [number, 1], params, max_tokens=2, tenant=f"t{number % NUM_TENANTS}"))
        while engine.stats().num_waiting > num_sequences:
            engine.step()
    while engine.has_work:
        engine.step()
    for number in range(num_seen, num_seen + num_sequences + num_waiting):
        tokens = [number, *range(prompt - 1)]
        engine.add(Request(number, tokens, params, max_tokens=most, tenant=f"t{number % NUM_TENANTS}"))
    while engine.stats().step_tokens != num_sequences or engine.stats().num_running != num_sequences:
        engine.step()
    times = []
    for _ in range(steps):
        start = time.thread_time()
        engine.step()
        times.append((time.thread_time() - start) * 1e3)
    return times


def measure(
    sequences: Sequence[int], prompt: int, steps: int, policies: Sequence[str], waiting: int, seen: Sequence[int]
) -> dict[str, Any]:
    """Milliseconds per step: a row for each number of sequences, policy and number of requests that came before."""
    rows = [
        {
            "sequences": size,
            "prompt": prompt,
            "policy": policy,
            "waiting": waiting,
            "seen": count,
            "step_ms": spread(step_milliseconds(size, prompt, steps, policy, waiting, count)),
        }
        for size, policy, count in itertools.product(sequences, policies, seen)
    ]
    return {"rows": rows}
