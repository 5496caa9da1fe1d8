"""The simulator beside the engine: the same jobs, once computed and once predicted."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.sim.clock import START
from octavo.sim.cost_model import StepWork, work_of
from octavo.sim.fitted import Fitted, fit
from octavo.sim.jobs import Job, Lengths, Workload
from octavo.sim.replica import Sizes
from octavo.sim.report import Ledger, Targets, Told
from octavo.sim.simulate import Fleet, Simulation
from octavo.sim.workloads import ClosedLoop, Profile, Sessions
from octavo.types import EngineInfo, Pending, Plan, Runner

SHORT = Profile(0, Lengths(96, 0.6, 512), Lengths(1), Lengths(32, 0.5, 128))
TALK = Profile(128, Lengths(48, 0.6, 256), Lengths(32, 0.6, 256), Lengths(32, 0.5, 128), 3.0, 1.0, 2)
CALIBRATION = ((1, 4), (2, 6), (4, 10), (8, 20), (16, 32))
"""Clients and requests of the loops that the time of a step is learned from."""
FIGURES = (
    ("output_tokens_per_second", "", 0.05),
    *((name, percent, 0.10) for name in ("ttft", "itl") for percent in ("p50", "p99")),
)
"""What is compared, and the error aimed at."""


class Watched:
    """A runner that notes what each step computes."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.work: StepWork | None = None

    def submit(self, plan: Plan) -> Pending:
        self.work = work_of(plan)
        return self.runner.submit(plan)


class Steps(NamedTuple):
    """Steps that were timed."""

    works: list[StepWork]
    seconds: list[float]


class Driver:
    """Serves a workload with a real engine, as time goes by."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self.watched = Watched(engine.runner)
        engine.runner = self.watched
        self.vocab_size = vocab_size
        self.num_requests = 0

    def serve(self, workload: Workload, steps: Steps | None = None) -> dict[str, Any]:
        """The figures of ``Ledger``; the time of each step, all around it included, goes to ``steps``."""
        ledger = Ledger(Targets())
        live: dict[int, Told] = {}
        texts: dict[int, list[int]] = {}
        due: list[tuple[float, int, Job]] = []
        coming = workload.next_job()
        zero, previous = time.perf_counter() - START, -1.0
        while coming is not None or due or self.engine.has_work:
            began = time.perf_counter() - zero
            while coming is not None and coming.arrival + START <= began:
                self._add(coming, coming.arrival + START, live, texts)
                coming = workload.next_job()
            while due and due[0][0] <= began:
                self._add(heapq.heappop(due)[2], began, live, texts)
            if not self.engine.has_work:
                time.sleep(0.0005)
                continue
            outputs = self.engine.step()
            now = time.perf_counter() - zero
            for output in outputs:
                texts.setdefault(live[output.request_id].job.output_token, []).extend(output.tokens)
            for told in ledger.take(outputs, live, previous, now):
                following = workload.after(told.job, now - START)
                if following is not None:
                    self.num_requests += 1
                    heapq.heappush(due, (following.arrival + START, self.num_requests, following))
            if outputs:
                previous = now
            if steps is not None and self.watched.work is not None:
                steps.works.append(self.watched.work)
                steps.seconds.append(time.perf_counter() - zero - began)
        return ledger.figures()

    def _add(self, job: Job, arrival: float, live: dict[int, Told], texts: dict[int, list[int]]) -> None:
        self.num_requests += 1
        tokens: list[int] = []
        for token, count in job.prompt:
            tokens += texts.get(token) or [token % self.vocab_size] * count
        live[self.num_requests] = Told(job, arrival)
        self.engine.add(job.request(self.num_requests, time.monotonic(), tokens))


def calibrate(driver: Driver, steps: Steps, seed: int) -> float:
    """Time steps of many shapes; returns requests a second in the largest loop."""
    speed = 0.0
    for clients, count in CALIBRATION:
        figures = driver.serve(ClosedLoop(count, 96, 32, 0.9, clients, seed=seed * 100 + clients), steps)
        speed = figures["requests_per_second"]
    return speed


def workloads(speed: float, count: int) -> list[tuple[str, Callable[[], Workload]]]:
    """Five workloads for an engine that does ``speed`` requests a second."""
    return [
        ("one client", lambda: ClosedLoop(count // 5, 96, 32, 0.9, 1, seed=11)),
        ("eight clients", lambda: ClosedLoop(count, 96, 32, 0.9, 8, seed=12)),
        ("poisson", lambda: Sessions(SHORT, 0.6 * speed, count, seed=13)),
        ("bursts", lambda: Sessions(SHORT, 0.5 * speed, count, burstiness=0.25, seed=14)),
        ("conversations", lambda: Sessions(TALK, 0.5 * speed, count, seed=15)),
    ]


def predict(cost: Fitted, info: EngineInfo, engine: EngineConfig, workload: Workload) -> dict[str, Any]:
    """The same jobs on a virtual clock."""
    sizes = Sizes(info.num_kv_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens, depth=1)
    return Simulation(Fleet(cost, sizes, cache=engine.cache, scheduler=engine.scheduler), workload, Targets()).run()


def compare(engine: Engine, info: EngineInfo, config: EngineConfig, count: int) -> tuple[dict[str, Any], Steps]:
    """Measure and predict each workload; calibration comes before each, as the machine may change. CPU engines only."""
    driver, steps = Driver(engine, info.vocab_size), Steps([], [])
    calibrate(driver, Steps([], []), seed=99)  # the first steps compile and warm caches
    speed = calibrate(driver, steps, seed=0)
    measured = []
    for number, (name, make) in enumerate(workloads(speed, count), 1):
        calibrate(driver, steps, seed=number)
        measured.append((name, make, driver.serve(make())))
    cost = fit(*steps)
    rows = [_row(name, predict(cost, info, config, make()), figures) for name, make, figures in measured]
    misses = [f"{row['workload']}: {name}" for row in rows for name in row["beyond"]]
    return {
        "steps_timed": cost.num_steps,
        "median_error_of_fit": cost.error,
        "rows": rows,
        "within": len(rows) * len(FIGURES) - len(misses),
        "beyond": misses,
    }, steps


def _row(name: str, predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": name, "requests": measured["requests"]}
    beyond: list[str] = []
    for figure, percent, aim in FIGURES:
        pair = [one[figure][percent] if percent else one[figure] for one in (predicted, measured)]
        label = f"{figure}_{percent}" if percent else figure
        error = pair[0] / pair[1] - 1
        row[label] = {"predicted": pair[0], "measured": pair[1], "error": round(error, 4)}
        if abs(error) > aim:
            beyond.append(label)
    return {**row, "beyond": beyond}
