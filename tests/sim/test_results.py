"""What comes out of simulations: the fewest devices, pictures, equal decisions, memory that does not grow."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo_fleet.sim import replica, search
from octavo_fleet.sim.client_metrics import LatencyTargets
from octavo_fleet.sim.plots import plot
from octavo_fleet.sim.search import cheapest
from octavo_fleet.sim.setup import SimulationSpec
from octavo_fleet.sim.simulate import Simulation
from tests.tiers import nightly

SPEC = SimulationSpec("llama-3.1-8b", "h200", "single", 60, rate=20, input_len=256, output_len=64)


def run(spec: SimulationSpec, **settings: Any) -> dict[str, Any]:
    return Simulation(spec.fleet(EngineConfig.from_flat(settings)), spec.clients(), LatencyTargets()).run()


@pytest.mark.nightly
def test_more_devices_for_each_replica_where_one_is_too_slow_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its weights alone take one H200 3.5 ms; and that is seen before 1,024 replicas are tried."""
    tried: list[int] = []
    simulated = search._simulated
    monkeypatch.setattr(search, "_simulated", lambda spec, *rest: tried.append(spec.replicas) or simulated(spec, *rest))
    found = cheapest(SPEC, EngineConfig(), LatencyTargets(itl=0.0035), 0.9, parallel=(1, 2), step_tokens=(2048,))
    assert [one.spec.tensor_parallel for one in found] == [2]
    assert max(tried) <= 64


def test_the_cheapest_of_several_comes_first_and_none_is_an_error() -> None:
    found = cheapest(SPEC, EngineConfig(), LatencyTargets(ttft=0.5), 0.99, parallel=(1, 4), step_tokens=(1024, 2048))
    assert [(one.num_devices, one.spec.tensor_parallel) for one in found] == [(1, 1), (1, 1)], "four are not cheaper"
    with pytest.raises(ConfigError, match="search"):
        cheapest(SPEC, EngineConfig(), LatencyTargets(ttft=1e-6), parallel=(1,), step_tokens=(2048,))


def test_the_picture_shows_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("matplotlib.image")
    from matplotlib.figure import Figure

    figures = run(SPEC)
    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: drawn.append(self) or save(self, *args, **more))
    path = tmp_path / "fleet.png"
    plot(figures, path)
    queue, latency = drawn[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for axes in (queue, latency) for line in axes.lines}
    assert lines["running"] == [point["running"] for point in figures["queue"]]
    assert lines["waiting"] == [point["waiting"] for point in figures["queue"]]
    assert lines["p99"] == [figures[name]["p99"] for name in ("ttft", "itl", "tpot", "e2el")]
    pixels = np.round(image.imread(path)[..., :3] * 255).astype(int)
    assert pixels.shape == (400, 1000, 3)
    colours = set(map(tuple, np.unique(pixels.reshape(-1, 3), axis=0).tolist()))
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= colours, "a line of the three is missing"


@pytest.mark.parametrize(
    ("workload", "steps", "preemptions", "hit_rate"), [("chat", 6699, 21, 0.201865), ("single", 3325, 13, 0.0)]
)
def test_decisions_are_those_that_they_always_were(
    workload: str, steps: int, preemptions: int, hit_rate: float
) -> None:
    """Whoever makes the scheduler, the cache or the simulator faster changes none; another cost of a step may.

    With 64 tokens a step there is no choice of budgets.
    """
    spec = SimulationSpec("llama-3.1-8b", "h200", workload, 120, rate=60, replicas=2)
    figures = run(spec, num_kv_blocks=400, block_size=16, max_num_seqs=24, max_num_batched_tokens=64)
    assert figures["requests"] + figures["refused"] == (136 if workload == "chat" else 120), "as chance has it"
    assert (figures["steps"], figures["preemptions"]) == (steps, preemptions)
    assert figures["prefix_hit_rate"] == pytest.approx(hit_rate, abs=1e-5)


def test_memory_does_not_grow_with_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MAX_ANSWERS", 64)

    def peak(num_requests: int) -> int:
        spec = SimulationSpec(
            "llama-3.1-8b", "h200", "W1", num_requests, concurrency=16, replicas=2, input_len=192, output_len=8
        )
        tracemalloc.start()
        try:
            run(spec, num_kv_blocks=64)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)
    assert peak(500) < 1.3 * peak(125)


COMMANDS = [
    line.split()[1:]
    for line in (Path(__file__).parents[2] / "docs/simulator.md").read_text().splitlines()
    if line.strip().startswith("octavo simulate")
]


@pytest.mark.parametrize("command", [nightly(line) if "--search" in line else line for line in COMMANDS], ids=" ".join)
def test_commands_of_the_page(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name in ("TIMES_ANSWER", "TIMES_TTFT"):  # figures of a few requests, for the test's sake
        monkeypatch.setattr(search, name, 0)
    lines = [{"timestamp": 100 * i, "input_length": 300, "output_length": 9, "hash_ids": [7]} for i in range(8)]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    steps = [{"tokens": 1 + i % 8, "rows": 1, "context": 50 + i, "pairs": 50 + i, "seconds": 0.01} for i in range(80)]
    Path("steps.jsonl").write_text("\n".join(map(json.dumps, steps)))
    model = ["--model", "llama-3.1-8b"] if "MODEL" in command else []
    assert main([*command, *model, "--num-prompts", "8"]) == 0
    assert ("fleet.png" in command) == Path("fleet.png").exists()
