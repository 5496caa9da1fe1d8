"""A simulation on several cores, for replicas that do not affect each other."""

from __future__ import annotations

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from typing import Any, NamedTuple

from octavo.errors import OctavoError
from octavo.system.cpus import num_cpus
from octavo_fleet.sim.client_metrics import LatencyTargets
from octavo_fleet.sim.jobs import Workload
from octavo_fleet.sim.replica import Result
from octavo_fleet.sim.simulate import Fleet, Simulation, figures

LEAST_JOBS = 10_000
"""Fewest jobs per process that are worth its start."""


def num_processes(fleet: Fleet, workload: Workload, num_requests: int) -> int:
    """Number of processes to use: limited by this process's cores, the replicas and the number of requests."""
    if not fleet.separates(workload):
        return 1
    return max(1, min(num_cpus(), fleet.num_replicas, num_requests // LEAST_JOBS))


def simulate(
    fleet: Fleet, workload: Workload, targets: LatencyTargets, processes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of ``Simulation.run``, which do not depend on ``processes``, and the resources used.

    For several processes the fleet must separate the workload: each creates all jobs, and serves those of its own
    replicas. Raises ``OctavoError`` when a process is lost.
    """
    started, spent_before = time.perf_counter(), time.process_time()
    if processes == 1:
        results, parts = Simulation(fleet, workload, targets).results(), []
    else:
        parts = _in_processes(fleet, workload, targets, processes)
        results = sorted(chain.from_iterable(part.results for part in parts), key=lambda one: one.number)
    found = figures(fleet, results)
    spent = time.process_time() - spent_before + sum(part.processor_seconds for part in parts)
    took = {
        "seconds": round(time.perf_counter() - started, 1),
        "processor_seconds": round(spent, 1),
        "processes": processes,
        "peak_memory_mb": _peak_memory() + sum(part.peak_memory_mb for part in parts),
    }
    return found, took


class WorkerResult(NamedTuple):
    """Result of one process."""

    results: list[Result]
    processor_seconds: float
    peak_memory_mb: int


def _in_processes(fleet: Fleet, workload: Workload, targets: LatencyTargets, processes: int) -> list[WorkerResult]:
    context = multiprocessing.get_context("forkserver")
    # What they import takes seconds, which they share. The server of forks stays until this process ends, with the
    # environment of its start, and is not counted among the resources used.
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(processes, context) as pool:
        futures = [
            pool.submit(_serve, fleet, workload, targets, range(first, fleet.num_replicas, processes))
            for first in range(processes)
        ]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise OctavoError("a process of the simulation was lost; it may have had too little memory") from None


def _serve(fleet: Fleet, workload: Workload, targets: LatencyTargets, numbers: range) -> WorkerResult:
    results = Simulation(fleet, workload, targets, numbers).results()
    return WorkerResult(results, time.process_time(), _peak_memory())


def _peak_memory() -> int:
    """Peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
