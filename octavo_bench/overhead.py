"""What deciding costs: the engine's own time per step, with a runner that answers at once."""

from __future__ import annotations

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
from octavo_bench.report import spread

TOKEN = 1000
"""An ordinary token in any vocabulary, one that has a text."""


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


def build_instant_engine(num_sequences: int, tokens: int, runner: Runner | None = None) -> Engine:
    """An engine over an instant runner, or another one, with room for ``num_sequences`` of ``tokens`` tokens."""
    cache = KVCache(num_sequences * (tokens // 16 + 2), block_size=16)
    scheduler = Scheduler(cache, max_num_seqs=num_sequences, max_num_batched_tokens=8192)
    return Engine(scheduler, runner or InstantRunner())


def decode_step_milliseconds(num_sequences: int, prompt: int, steps: int) -> list[float]:
    """Wall time of each of ``steps`` steps in which every sequence decodes one token."""
    engine = build_instant_engine(num_sequences, prompt + steps + 64)
    params = SamplingParams(temperature=0, ignore_eos=True)
    for number in range(num_sequences):
        engine.add(Request(number, [number, *range(prompt - 1)], params, max_tokens=steps + 64))
    while engine.stats().num_waiting or engine.stats().step_tokens != num_sequences:
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure_waiting(policy: str, num_running: int, num_waiting: int, num_seen: int, steps: int = 200) -> dict[str, Any]:
    """Milliseconds of steps in which ``num_running`` decode and others wait, after ``num_seen`` that came and went.

    It is processor time, so that other work on the machine counts little, and holds what a server does around a step.
    """
    tokens = 16 + steps + 64
    cache = KVCache(num_running * (tokens // 16 + 2), block_size=16)
    scheduler = Scheduler(
        cache,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        settings=SchedulerSettings(scheduling_policy=policy),
    )
    engine = Engine(scheduler, InstantRunner())
    params = SamplingParams(temperature=0, ignore_eos=True)
    started = time.thread_time()
    for number in range(num_seen):
        engine.add(Request(number, [number, 1], params, max_tokens=2, tenant=f"t{number % 100}"))
        while engine.stats().num_waiting > num_running:
            engine.step()
    while engine.has_work:
        engine.step()
    seconds = time.thread_time() - started
    for number in range(num_seen, num_seen + num_running + num_waiting):
        engine.add(Request(number, [number, *range(15)], params, max_tokens=steps + 64, tenant=f"t{number % 100}"))
    times = []
    for _ in range(steps + 20):
        start = time.thread_time()
        engine.step()
        engine.stats()
        engine.take_events()
        times.append((time.thread_time() - start) * 1e3)
    return {
        "policy": policy,
        "running": engine.stats().num_running,
        "waiting": engine.stats().num_waiting,
        "seen": num_seen,
        "seen_us_each": round(seconds / num_seen * 1e6, 2) if num_seen else None,
        "step_ms": spread(times[20:]),
    }


def measure(sequences: Sequence[int], prompt: int, steps: int) -> dict[str, Any]:
    """One row for each number of sequences: milliseconds per step."""
    rows = [
        {"sequences": size, "prompt": prompt, "step_ms": spread(decode_step_milliseconds(size, prompt, steps))}
        for size in sequences
    ]
    return {"rows": rows}


def waiting(policies: Sequence[str], running: int, waiting: int, seen: Sequence[int]) -> dict[str, Any]:
    """A row of ``measure_waiting`` for each policy and number of requests that came before."""
    return {"rows": [measure_waiting(policy, running, waiting, count) for policy in policies for count in seen]}
