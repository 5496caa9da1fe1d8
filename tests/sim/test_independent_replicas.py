"""Replicas that have no effect on each other give the same figures one by one, and in several processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo_fleet.sim import simulate as simulation
from octavo_fleet.sim import workers
from octavo_fleet.sim.client_metrics import MAX_POINTS, LatencyTargets, Ledger, Timeline
from octavo_fleet.sim.jobs import Awaits, Job
from octavo_fleet.sim.setup import SimulationSpec
from octavo_fleet.sim.simulate import Fleet, Simulation, figures
from octavo_fleet.sim.workers import num_processes, simulate
from tests.tiers import nightly_after

TARGETS = LatencyTargets(0.2, 0.012)
SMALL = {"num_kv_blocks": 400, "block_size": 16, "max_num_seqs": 24}
FAIR = {**SMALL, "scheduling_policy": "fair", "eviction_policy": "session"}


def fleet_of(spec: SimulationSpec, settings: dict[str, Any]) -> Fleet:
    return spec.fleet(EngineConfig.from_flat(settings))


def spec_for(tmp_path: Path, workload: str, router: str, replicas: int, seed: int) -> SimulationSpec:
    if workload == "trace":
        path = tmp_path / "trace.jsonl"
        lines = [
            {
                "timestamp": 40 * (i // 3) - 90 * (i % 7 == 3),
                "input_length": 700 + 37 * i % 900,
                "output_length": 1 + i % 60,
                "hash_ids": [i % 5, 50 + i % 7, *((1000 + i,) if i % 2 else ())],
            }
            for i in range(90)
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        workload = str(path)
    log = None
    if workload == "timed":
        log, workload = tmp_path / "steps.jsonl", "single"
        steps = [
            {"tokens": 1 + i % 8, "rows": 1, "context": 50 + i, "pairs": 50 + i, "seconds": 0.01 + 0.001 * (i % 5)}
            for i in range(80)
        ]
        log.write_text("\n".join(map(json.dumps, steps)))
    return SimulationSpec(
        "llama-3.1-8b", "h200", workload, 100, rate=70, burstiness=0.5, replicas=replicas, router=router,
        cost_log=log, seed=seed,
    )  # fmt: skip


CASES = [
    ("single", "round-robin", 5, SMALL),
    ("single", "session", 3, {}),
    ("agent", "session", 3, {}),
    ("summary", "round-robin", 2, {}),
    ("chat", "session", 4, FAIR),
    ("trace", "round-robin", 3, SMALL),
    ("trace", "session", 2, {}),
    ("timed", "round-robin", 3, SMALL),
]


@pytest.mark.parametrize(("workload", "router", "replicas", "settings"), nightly_after(1, CASES))
def test_the_same_figures_together_and_independently(
    workload: str,
    router: str,
    replicas: int,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_for(tmp_path, workload, router, replicas, seed=len(workload))
    fleet = fleet_of(spec, settings)
    assert fleet.separates(spec.clients())
    together = Simulation(fleet, spec.clients(), TARGETS)
    together.serve_together()
    want = figures(fleet, [replica.result() for replica in together.replicas])
    assert want["requests"] + want["refused"] > 60
    for turn in (1, 20):
        monkeypatch.setattr(simulation, "TURN", turn)
        apart = Simulation(fleet, spec.clients(), TARGETS)
        apart.serve_independently()
        assert figures(fleet, [replica.result() for replica in apart.replicas]) == want
        for replica in apart.replicas:
            replica.engine.check()
            assert not replica.live, "a request without an answer"
    parts = [Simulation(fleet, spec.clients(), TARGETS, range(first, replicas, 2)).results() for first in (0, 1)]
    assert figures(fleet, sorted(parts[0] + parts[1], key=lambda one: one.number)) == want


@pytest.mark.parametrize(
    ("workload", "router", "separates"),
    [
        ("single", "least-loaded", False),
        ("single", "prefix-aware", False),
        ("chat", "round-robin", False),
        ("chat", "session", True),
        ("single", "round-robin", True),
    ],
)
def test_only_independent_replicas_are_divided_among_processes(workload: str, router: str, separates: bool) -> None:
    spec = SimulationSpec("llama-3.1-8b", "h200", workload, 10, rate=10, replicas=8, router=router)
    fleet = fleet_of(spec, {})
    assert fleet.separates(spec.clients()) == separates
    loop = SimulationSpec("llama-3.1-8b", "h200", "W1", 10, concurrency=4, replicas=8, router=router)
    assert not fleet.separates(loop.clients()), "who asks next depends on who is answered first"
    assert num_processes(fleet, loop.clients(), 1_000_000) == 1
    assert num_processes(fleet, spec.clients(), 100) == 1
    assert (num_processes(fleet, spec.clients(), 1_000_000) > 1) <= separates


@pytest.mark.parametrize(
    ("workload", "router", "processes"),
    nightly_after(1, [("chat", "session", 2), ("trace", "round-robin", 3), ("timed", "round-robin", 2)]),
)
def test_the_same_figures_of_several_processes(workload: str, router: str, processes: int, tmp_path: Path) -> None:
    spec = spec_for(tmp_path, workload, router, 3, seed=4)
    fleet = fleet_of(spec, SMALL)
    want, alone = simulate(fleet, spec.clients(), TARGETS, 1)
    got, took = simulate(fleet, spec.clients(), TARGETS, processes)
    assert got == want
    assert (alone["processes"], took["processes"]) == (1, processes)
    assert took["processor_seconds"] > 0
    assert took["peak_memory_mb"] > alone["peak_memory_mb"]


@pytest.mark.nightly
def test_the_command_gives_the_same_json_with_any_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "simulate --workload chat --rate 90 --num-prompts 200 --replicas 4 --router session --slo-ttft 0.1"
    written = []
    for cores in (1, 2):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(workers, "LEAST_JOBS", 10)
        path = tmp_path / f"{cores}.json"
        assert main([*command.split(), "--output", str(path)]) == 0
        written.append(json.loads(path.read_text()))
        assert written[-1].pop("took")["processes"] == cores
    assert written[0] == written[1]


class Dies:
    """A workload whose process ends at once."""

    awaits: Awaits = "none"

    def next_job(self) -> Job | None:
        os._exit(9)

    def after(self, job: Job, now: float) -> Job | None:
        return None


def test_a_lost_process_and_a_bad_trace_are_reported(tmp_path: Path) -> None:
    fleet = fleet_of(
        SimulationSpec("llama-3.1-8b", "h200", "single", 10, rate=1, replicas=2, router="round-robin"), SMALL
    )
    with pytest.raises(OctavoError, match="lost"):
        simulate(fleet, Dies(), TARGETS, 2)
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": []}\n{"input_length": 1}\n')
    trace = SimulationSpec("llama-3.1-8b", "h200", str(path), 10, replicas=2, router="round-robin")
    with pytest.raises(ConfigError, match="entry 2"):
        simulate(fleet, trace.clients(), TARGETS, 2)


def test_a_conversation_is_the_same_whenever_it_is_answered() -> None:
    spec = SimulationSpec("llama-3.1-8b", "h200", "agent", 60, rate=10, seed=3)
    early, late = spec.clients(), spec.clients()
    opened, followed = [], []
    while (job := early.next_job()) is not None:
        opened.append(job)
        followed.append(early.after(job, 5.0))
    assert opened == [late.next_job() for _ in opened]
    assert followed[::-1] == [late.after(job, 5.0) for job in reversed(opened)]
    texts = [token for job in opened for token, _ in job.prompt[1:]]
    texts += [token for job in opened for token in range(job.output_token, job.output_token + 2 * job.turns_left + 1)]
    assert len(set(texts)) == len(texts), "two texts are the same"


def test_timelines_of_any_length_add_up() -> None:
    """Against every point by itself: a queue that is ``value`` for a while, seen every quarter of a second."""
    lengths, total = (0, 3, 200, 700, 3000), Timeline()
    for value, length in enumerate(lengths, 1):
        one = Timeline()
        for quarter in range(length):
            one.note(1.0 + quarter / 4, value, 10 * value)
        assert len(one.points) < MAX_POINTS
        total.merge(one)
    step = round(total.interval * 4)
    assert len(total.points) == -(-max(lengths) // step) < MAX_POINTS
    for index, (waiting, running) in enumerate(total.points):
        want = sum(value for value, length in enumerate(lengths, 1) if index * step < length)
        assert (waiting, running) == (want, 10 * want)


def test_a_quiet_time_is_filled_with_the_queue_before_it() -> None:
    timeline = Timeline()
    timeline.note(1.0, 0, 0)
    timeline.note(2.1, 1, 2)
    assert timeline.points == [(0, 0)] + [(1, 2)] * 4
    ledger = Ledger()
    ledger.timeline = timeline
    assert [point["second"] for point in ledger.figures()["queue"]] == [0, 0.25, 0.5, 0.75, 1.0]
