"""Many short requests over a model that costs nothing: what the deciding half does in a second.

The requests are those of the synthetic benchmark of github.com/ad-github1/LLM-INFERENCE-ENGINE, draw by draw, so that
both can be run beside each other: ``random.Random(seed)`` gives each request its number of prompt tokens, its number
of output tokens, and its prompt.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from octavo.cache.kv_cache import KVCache
from octavo.cli.settings import flag_name
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_fleet.backends.toy_models import VOCAB_SIZE, FakeRunner, NextByFormula
from octavo_fleet.llm_engine import external_fragmentation


@dataclass(frozen=True)
class SyntheticWork:
    """Sizes of the run. ``prefill_budget`` tokens of prompts fit into a step beside one token of each that decodes."""

    requests: int = 1000
    seed: int = 7
    min_prompt: int = 4
    max_prompt: int = 96
    min_new: int = 4
    max_new: int = 24
    max_batch_size: int = 32
    prefill_budget: int = 512
    block_size: int = 16
    cache_blocks: int = 4096
    policy: str = "fcfs"

    def make(self) -> list[Request]:
        rng = random.Random(self.seed)
        made = []
        for number in range(self.requests):
            num_prompt_tokens = rng.randint(self.min_prompt, self.max_prompt)
            max_tokens = rng.randint(self.min_new, self.max_new)
            prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(num_prompt_tokens)]
            made.append(Request(number, prompt, SamplingParams(max_tokens=max_tokens), max_tokens))
        return made


class Tally:
    """What the steps were like."""

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.batch_sizes: list[int] = []
        self.utilization: list[float] = []
        self.internal: list[float] = []
        self.external: list[float] = []

    def note(self, cache: KVCache, batch_size: int, seconds: float, wants_external: bool) -> None:
        self.step_ms.append(seconds * 1e3)
        self.batch_sizes.append(batch_size)
        self.utilization.append(cache.num_filled / (cache.num_blocks * cache.block_size))
        self.internal.append(cache.num_empty_slots / max(1, cache.groups[0].num_slots))
        if wants_external:
            self.external.append(external_fragmentation(cache.groups[0].pool.free_blocks))


def run(work: SyntheticWork, external: bool = False) -> dict[str, Any]:
    """Serve ``work`` and give its figures. The time is that of adding and serving the requests, not of making them.

    ``external`` also measures external fragmentation, which sorts the free blocks after every step. Raises
    ``ConfigError`` for a range without numbers.
    """
    for least, most in (("min_prompt", "max_prompt"), ("min_new", "max_new")):
        if getattr(work, least) > getattr(work, most):
            raise ConfigError(f"{flag_name(least)}: must be at most {flag_name(most)}")
    requests = work.make()
    scheduler = Scheduler(
        KVCache(work.cache_blocks, work.block_size),
        max_num_seqs=work.max_batch_size,
        max_num_batched_tokens=work.prefill_budget + work.max_batch_size,
        settings=SchedulerSettings(scheduling_policy=work.policy),
        clock=lambda: 0.0,  # steps without measured times have the whole budget, on every machine
    )
    engine = Engine(scheduler, FakeRunner(NextByFormula()))
    tally, ends, firsts = Tally(), [], []
    waits: dict[int, float] = {}
    num_failed = 0
    clock = time.perf_counter
    started = clock()
    submitted = {}
    for request in requests:
        submitted[request.id] = clock()
        engine.add(request)
    seen: set[int] = set()
    checksum = 0
    while engine.has_work:
        step_started = clock()
        outputs = engine.step()
        now = clock()
        for item in engine.last_plan:
            if item.seq.id not in waits:
                waits[item.seq.id] = (step_started - submitted[item.seq.id]) * 1e3
        for output in outputs:
            num_failed += output.finish_reason == "error"
            for token in output.tokens:
                checksum = (checksum * 31 + token * (output.request_id + 1)) % 2**61
            if output.request_id not in seen:
                seen.add(output.request_id)
                firsts.append((now - submitted[output.request_id]) * 1e3)
            if output.finish_reason is not None:
                ends.append((now - submitted[output.request_id]) * 1e3)
        batch_size = len(outputs) + len(scheduler.cut)
        tally.note(scheduler.cache, batch_size, now - step_started, external)
    of_requests = {"latency": ends, "time_to_first_token": firsts, "queue_wait": list(waits.values())}
    return {**_figures(work, tally, engine, clock() - started, of_requests, checksum), "failed_requests": num_failed}


def _figures(
    work: SyntheticWork,
    tally: Tally,
    engine: Engine,
    seconds: float,
    of_requests: dict[str, list[float]],
    checksum: int,
) -> dict[str, Any]:
    stats, num_ended = engine.stats(), len(of_requests["latency"])
    figures: dict[str, Any] = {
        "submitted_requests": work.requests,
        "completed_requests": num_ended,
        "total_generated_tokens": stats.num_output_tokens,
        "total_prefill_tokens": stats.num_prompt_tokens,
        "step_count": len(tally.step_ms),
        "elapsed_ms": seconds * 1e3,
        "total_decode_tokens": stats.num_output_tokens - num_ended,
        "request_throughput_rps": num_ended / seconds,
        "token_throughput_tps": stats.num_output_tokens / seconds,
        "avg_batch_size": statistics.fmean(tally.batch_sizes),
        "max_batch_size_seen": max(tally.batch_sizes),
        "avg_step_duration_ms": statistics.fmean(tally.step_ms),
        "preemptions": stats.num_preemptions,
        "tokens_checksum": checksum,
    }
    for name, values in {**of_requests, "step_duration": tally.step_ms}.items():
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        figures |= {f"p{percent}_{name}_ms": cuts[percent - 1] for percent in (50, 95, 99)}
    shares = {"memory_utilization": tally.utilization, "internal_fragmentation_ratio": tally.internal}
    if tally.external:
        shares["external_fragmentation_ratio"] = tally.external
    for name, shares_of in shares.items():
        figures |= {f"avg_{name}": statistics.fmean(shares_of), f"peak_{name}": max(shares_of)}
    return dict(sorted(figures.items()))
