"""Search for the cheapest fleet that meets latency targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import EngineConfig, to_flat
from octavo.errors import ConfigError
from octavo_fleet.sim.client_metrics import LatencyTargets, Overloaded
from octavo_fleet.sim.setup import SimulationSpec
from octavo_fleet.sim.workers import num_processes, simulate

MAX_REPLICAS = 1024
PARALLEL = (1, 2, 4, 8)
STEP_TOKENS = (1024, 2048, 8192)
TIMES_ANSWER, TIMES_TTFT, LONGEST_TTFT = 10, 20, 10.0
"""Requests come for so many times the time of an answer, and the targeted time to a first token (of at most so many
seconds): of a load that is a tenth too much, a tenth waits at the end."""
LONE_RATE, LONE_REQUESTS = 0.01, 40
"""Requests that hardly ever meet."""


@dataclass(frozen=True)
class FoundConfig:
    """A configuration that meets the targets, and its simulated figures."""

    spec: SimulationSpec
    max_num_batched_tokens: int
    figures: dict[str, Any]

    @property
    def num_devices(self) -> int:
        return self.spec.replicas * self.spec.tensor_parallel


def cheapest(
    spec: SimulationSpec,
    engine: EngineConfig,
    targets: LatencyTargets,
    share: float = 0.99,
    parallel: Sequence[int] = PARALLEL,
    step_tokens: Sequence[int] = STEP_TOKENS,
) -> list[FoundConfig]:
    """Configurations that meet ``targets`` for at least ``share`` of the requests, fewest devices first.

    For each degree of tensor parallelism and each token budget, the least number of replicas is found by doubling and
    bisection, assuming that more replicas never perform worse; not where they would be more devices than were found
    before. Requests come for long enough that a queue that grows is seen, and the first ones are not judged: until the
    fleet is as full as it will be, any is fast enough. Raises ``ConfigError`` if no configuration meets the targets.
    """
    found: list[FoundConfig] = []
    for degree in parallel:
        for tokens in step_tokens:
            most = min((one.num_devices for one in found), default=MAX_REPLICAS * degree) // degree
            try:
                with_tokens = _with(engine, tokens)
                best = _fewest(replace(spec, tensor_parallel=degree), with_tokens, tokens, targets, share, most)
            except ConfigError as error:
                if "tensor_parallel" not in str(error):
                    raise
                continue  # the model does not fit, or its heads are not divisible by this degree
            if best is not None:
                found.append(best)
    if not found:
        raise ConfigError(
            f"search: no fleet of up to {MAX_REPLICAS} replicas answers {share:.0%} of the requests within the targets"
        )
    return sorted(found, key=lambda one: (one.num_devices, one.figures["ttft"]["p99"]))


def _fewest(
    spec: SimulationSpec, engine: EngineConfig, tokens: int, targets: LatencyTargets, share: float, most: int
) -> FoundConfig | None:
    """The fewest replicas, up to ``most``; ``None`` if these are too few, or none at all as each is too slow."""

    def tried(replicas: int) -> FoundConfig | None:
        return _simulated(replace(spec, replicas=replicas), engine, tokens, targets, share)

    if spec.rate is not None:
        lone = replace(spec, rate=LONE_RATE, num_requests=LONE_REQUESTS, replicas=1)
        if _simulated(lone, engine, tokens, targets, share) is None:
            return None  # too slow with nothing else to do
    low, high, best = 0, 1, None
    while best is None and high <= most:
        best = tried(high)
        if best is None:
            low, high = high, max(min(2 * high, most), high + 1)
    if best is None:
        return None
    high = best.spec.replicas
    while high - low > 1:
        middle = (low + high) // 2
        if (more := tried(middle)) is not None:
            best, high = more, middle
        else:
            low = middle
    return best


def _simulated(
    spec: SimulationSpec, engine: EngineConfig, tokens: int, targets: LatencyTargets, share: float
) -> FoundConfig | None:
    """The configuration, if it meets the targets."""
    while True:
        num_settling = spec.num_requests // 4 if spec.rate is not None else 0
        judged = replace(
            targets,
            settled=num_settling / spec.rate if spec.rate else 0.0,
            most_bad=max(1, (1 - share) * (spec.num_requests - num_settling)),
        )
        fleet, workload = spec.fleet(engine), spec.clients()
        try:
            figures, _ = simulate(fleet, workload, judged, num_processes(fleet, workload, spec.num_requests))
        except Overloaded:
            return None
        if spec is not (spec := spec.at_its_rate(figures)):
            continue
        if figures["good_share"] < share:
            return None
        longest = max(TIMES_ANSWER * figures["e2el"]["mean"], TIMES_TTFT * min(targets.ttft, LONGEST_TTFT))
        if spec.rate is None or spec.num_requests >= 0.95 * longest * spec.rate:
            return FoundConfig(spec, tokens, figures)
        spec = replace(spec, num_requests=math.ceil(longest * spec.rate))


def _with(engine: EngineConfig, tokens: int) -> EngineConfig:
    seqs = engine.scheduler.max_num_seqs
    return EngineConfig.from_flat({**to_flat(engine), "max_num_batched_tokens": max(tokens, seqs or 0)})
