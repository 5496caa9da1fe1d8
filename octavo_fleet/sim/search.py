"""Search for the cheapest fleet that meets latency targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import EngineConfig, to_flat
from octavo.errors import ConfigError
from octavo_fleet.sim.report import Targets
from octavo_fleet.sim.setup import SimulationSpec
from octavo_fleet.sim.workers import num_processes, simulate

MAX_REPLICAS = 1024
PARALLEL = (1, 2, 4, 8)
STEP_TOKENS = (1024, 2048, 8192)
IDLE = 0.5
"""Below this busy fraction, more replicas do not reduce latency."""


@dataclass(frozen=True)
class Found:
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
    targets: Targets,
    share: float = 0.99,
    parallel: Sequence[int] = PARALLEL,
    step_tokens: Sequence[int] = STEP_TOKENS,
) -> list[Found]:
    """Configurations that meet ``targets`` for at least ``share`` of the requests, fewest devices first.

    For each degree of tensor parallelism and each token budget, the least number of replicas is found by doubling and
    bisection, assuming that more replicas never perform worse. Raises ``ConfigError`` if no configuration meets them.
    """
    found = []
    for degree in parallel:
        for tokens in step_tokens:
            try:
                best = _fewest(replace(spec, tensor_parallel=degree), _with(engine, tokens), tokens, targets, share)
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


def _fewest(spec: SimulationSpec, engine: EngineConfig, tokens: int, targets: Targets, share: float) -> Found | None:
    best: Found | None = None
    low, high, before = 0, 1, -1.0
    while best is None:
        tried = _simulated(replace(spec, replicas=high), engine, tokens, targets)
        good_share = tried.figures["good_share"]
        if good_share >= share:
            best = tried
        elif high == MAX_REPLICAS or (good_share == before and tried.figures["busy_share"] < IDLE):
            return None  # further replicas change nothing
        else:
            low, high, before = high, 2 * high, good_share
    while high - low > 1:
        middle = (low + high) // 2
        tried = _simulated(replace(spec, replicas=middle), engine, tokens, targets)
        if tried.figures["good_share"] >= share:
            best, high = tried, middle
        else:
            low = middle
    return best


def _simulated(spec: SimulationSpec, engine: EngineConfig, tokens: int, targets: Targets) -> Found:
    fleet, workload = spec.fleet(engine), spec.clients()
    figures, _ = simulate(fleet, workload, targets, num_processes(fleet, workload, spec.num_requests))
    return Found(spec, tokens, figures)


def _with(engine: EngineConfig, tokens: int) -> EngineConfig:
    seqs = engine.scheduler.max_num_seqs
    return EngineConfig.from_flat({**to_flat(engine), "max_num_batched_tokens": max(tokens, seqs or 0)})
