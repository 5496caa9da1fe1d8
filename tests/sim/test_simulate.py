"""The fleet on a virtual clock: against times worked out by hand, and against the engine stepped alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.cli import main
from octavo.config import EngineConfig, SchedulerSettings
from octavo.engine.timing.step_model import StepWork
from octavo.errors import ConfigError
from octavo.steps.limits import StateSize
from octavo_fleet.sim.client_metrics import LatencyTargets, Ledger
from octavo_fleet.sim.clock import START
from octavo_fleet.sim.costs.cost_model import CostModel
from octavo_fleet.sim.event_loop import Transfer
from octavo_fleet.sim.jobs import Awaits, Job, Workload
from octavo_fleet.sim.replica import ReplicaSizes
from octavo_fleet.sim.setup import SimulationSpec
from octavo_fleet.sim.simulate import Fleet, Simulation
from octavo_fleet.sim.workloads import PROFILES, ClosedLoop, SessionWorkload
from tests.engine.virtual import StepCost, VirtualEngine
from tests.tiers import one_in

ANYTHING = LatencyTargets()
SIZES = ReplicaSizes(num_blocks=512, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, depth=1)


class Linear(CostModel):
    """The same cost as ``StepCost``: exact in binary, so that sums compare equal."""

    def seconds(self, work: StepWork) -> float:
        return 0.0078125 + work.tokens / 65536 + work.rows / 131072


class Listed:
    """Jobs from a list."""

    awaits: Awaits = "none"

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs

    def next_job(self) -> Job | None:
        return self.jobs.pop(0) if self.jobs else None

    def after(self, job: Job, now: float) -> Job | None:
        return None


class Run(NamedTuple):
    simulation: Simulation
    figures: dict[str, Any]
    ledger: Ledger


def simulate(workload: Workload, targets: LatencyTargets = ANYTHING, **changes: Any) -> Run:
    simulation = Simulation(Fleet(**{"cost": Linear(), "sizes": SIZES, **changes}), workload, targets)
    figures = simulation.run()
    for replica in simulation.replicas:
        replica.engine.check()
        assert not replica.live, "a request without an answer"
    ledger = Ledger()
    for replica in simulation.replicas:
        ledger.merge(replica.ledger)
    return Run(simulation, figures, ledger)


def test_one_request_by_hand() -> None:
    cost = Linear()
    run = simulate(Listed([Job(2.0, ((5, 100),), 3, 9)]))
    # 64 + 36 prompt tokens in two steps, the second of which samples; then two single tokens.
    chunks = cost.seconds(StepWork(64, 0, 64, 0)) + cost.seconds(StepWork(36, 1, 100, 0))
    single = cost.seconds(StepWork(1, 1, 101, 101))
    assert run.figures["ttft"]["max"] == pytest.approx(chunks)
    assert run.figures["itl"]["max"] == pytest.approx(single)
    assert run.figures["e2el"]["max"] == pytest.approx(chunks + 2 * single)
    assert run.figures["seconds"] == pytest.approx(2 + chunks + 2 * single)
    assert run.ledger.itl.count == 2


def test_decides_as_an_engine_stepped_alone_does() -> None:
    jobs = []
    sessions = SessionWorkload(PROFILES["single"]._replace(), rate=40, num_requests=60, seed=3)
    while (job := sessions.next_job()) is not None:
        jobs.append(Job(job.arrival, ((job.prompt[0][0], min(300, job.prompt[0][1])),), job.output_len % 90 + 1, 7))
    requests = [job.request(number, job.arrival + START, job.tokens()) for number, job in enumerate(jobs, 1)]
    alone = VirtualEngine(
        SchedulerSettings(),
        cost=StepCost(0.005, 0.00002, 0.00001),
        num_blocks=120,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    progress = alone.serve(requests)

    class Same(CostModel):
        def seconds(self, work: StepWork) -> float:
            num_sequences = max(1, work.rows)
            return 0.005 + 0.00002 * work.tokens + 0.00001 * num_sequences

    run = simulate(Listed(list(jobs)), cost=Same(), sizes=SIZES._replace(num_blocks=120))
    ledger = run.ledger
    assert ledger.num_finished == len(jobs)
    assert ledger.num_output_tokens == sum(len(one.token_times) for one in progress.values())
    assert run.simulation.replicas[0].engine.stats().num_preemptions == alone.engine.stats().num_preemptions
    assert ledger.ttft.total == pytest.approx(sum(one.ttft for one in progress.values()), rel=0.02)
    assert ledger.itl.count == sum(len(one.gaps) for one in progress.values())


def test_requests_of_one_moment_are_in_one_step() -> None:
    """Also to a replica that slept, which does not begin with the first of them alone."""
    cost = Linear()
    jobs = [Job(moment, ((10 * index + round(moment), 16),), 1, 9) for moment in (0.0, 5.0) for index in range(1, 5)]
    run = simulate(Listed(jobs))
    together = cost.seconds(StepWork(64, 4, 64, 0))
    assert run.ledger.ttft.count == 8
    assert run.ledger.ttft.total == pytest.approx(8 * together)


def test_later_turns_find_what_the_turns_before_left() -> None:
    profile = PROFILES["chat"]._replace(turns=6.0, pause=0.5, applications=1)
    run = simulate(SessionWorkload(profile, 4.0, 80, seed=1), sizes=SIZES._replace(num_blocks=8192))
    assert run.figures["requests"] == 80
    assert run.figures["prefix_hit_rate"] > 0.5
    sizes = SIZES._replace(num_blocks=8192, states=StateSize(8 + 400, 8, 1536))
    recurrent = simulate(SessionWorkload(profile, 4.0, 80, seed=1), sizes=sizes)
    assert run.figures["prefix_hit_rate"] > recurrent.figures["prefix_hit_rate"] > 0.9 * run.figures["prefix_hit_rate"]
    for replica in recurrent.simulation.replicas:
        replica.cache.check([])
        assert replica.engine.stats().num_used_states == 0


@pytest.mark.nightly
def test_routers_keep_conversations_where_they_are_cached() -> None:
    profile = PROFILES["agent"]._replace(applications=6)
    rates = {}
    for router in ("round-robin", "least-loaded", "prefix-aware"):
        sizes = SIZES._replace(num_blocks=4096, max_num_batched_tokens=2048)
        workload = SessionWorkload(profile, 20.0, 300, seed=2)
        run = simulate(workload, router=router, num_replicas=4, sizes=sizes)
        assert run.figures["requests"] + run.figures["refused"] == 300
        rates[router] = run.figures["prefix_hit_rate"]
    assert rates["prefix-aware"] > max(rates["round-robin"], rates["least-loaded"]) + 0.05


def test_a_closed_loop_has_never_more_under_way_than_clients() -> None:
    run = simulate(ClosedLoop(50, 40, 20, 0.5, 4), num_replicas=2)
    points = run.ledger.timeline.points
    assert run.figures["requests"] == 50
    assert points
    assert max(waiting + running for waiting, running in points) <= 4


def test_goodput_counts_those_within_both_targets() -> None:
    jobs = [Job(0.0, ((index, 64),), 4, 9) for index in range(1, 5)]
    run = simulate(Listed(jobs), LatencyTargets(ttft=0.02), sizes=SIZES._replace(max_num_seqs=1))
    assert run.figures["good_share"] == 0.25
    assert simulate(Listed([Job(0.0, ((1, 64),), 4, 9)]), LatencyTargets(itl=0.001)).figures["good_share"] == 0


def test_refuses_what_no_replica_can_hold_and_goes_on() -> None:
    jobs = [Job(0.0, ((1, 100_000),), 4, 9), Job(0.1, ((2, 10),), 4, 9)]
    run = simulate(Listed(jobs))
    assert run.figures["refused"] == 1
    assert run.figures["requests"] == 1


def test_two_steps_in_flight_give_the_same_tokens() -> None:
    one = simulate(ClosedLoop(30, 40, 20, 0.5, 4))
    two = simulate(ClosedLoop(30, 40, 20, 0.5, 4), sizes=SIZES._replace(depth=2))
    assert one.ledger.num_output_tokens == two.ledger.num_output_tokens


def test_equal_seeds_give_equal_figures() -> None:
    first, second = (simulate(SessionWorkload(PROFILES["chat"], 50, 30, seed=4), num_replicas=3) for _ in range(2))
    assert first.figures == second.figures
    third = simulate(SessionWorkload(PROFILES["chat"], 50, 30, seed=5), num_replicas=3)
    assert first.figures != third.figures


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    common = [
        "simulate",
        "--device",
        "h200",
        "--workload",
        "chat",
        "--rate",
        "50",
        "--slo-ttft",
        "1",
        "--policy",
        "fair",
    ]
    assert main([*common, "--num-prompts", "60", "--replicas", "2", "--price", "3", "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    hours = written["device_hours_per_million_output_tokens"]
    assert written["cost_per_million_output_tokens"] == pytest.approx(3 * hours)
    assert written["queue"]
    assert written["requests"] + written["refused"] <= 60
    table = capsys.readouterr().out
    assert table.startswith("2 replicas of llama-3.1-8b on h200; workload chat, 50 requests/s offered\n")
    assert f"{1000 * written['ttft']['p99']:,.1f}" in next(line for line in table.splitlines() if "TTFT" in line)
    assert f"cost {3 * hours:,.2f}" in table
    assert main([*common, "--num-prompts", "60", "--replicas", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["good_share"] == written["good_share"]


@one_in(2)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "abacus"], "device"),
        (["--workload", "nothing", "--rate", "1"], "workload"),
        (["--workload", "chat"], "--rate, in requests per second, or --concurrency"),
        (["--router", "guess", "--rate", "1"], "router"),
        (["--model", "gpt9", "--rate", "1"], "model"),
        (["--rate", "1", "--tensor-parallel-size", "3"], "tensor_parallel"),
        (["--rate", "1", "--device", "l4", "--gpu-memory-utilization", "0.6"], "device"),
        (["--rate", "1", "--search"], "--slo-ttft"),
        (["--rate", "1", "--policy", "static", "--turn-tokens", "4"], "turn_tokens"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--num-prompts", "2", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_target_for_each_token_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def p99(*flags: str) -> float:
        common = ["--workload", "single", "--rate", "40", "--num-prompts", "80", "--input-len", "3000"]
        assert main(["simulate", *common, "--policy", "deadline", "--json", *flags]) == 0
        return float(json.loads(capsys.readouterr().out)["tpot"]["p99"])

    assert p99() > 0.02
    assert p99("--tpot-target", "0.012") <= 0.012


@pytest.mark.nightly
def test_search_finds_the_least_number_of_devices() -> None:
    from octavo_fleet.sim.search import cheapest

    spec = SimulationSpec("llama-3.1-8b", "h200", "single", 300, rate=60, input_len=2000)
    targets = LatencyTargets(ttft=0.5, itl=0.02)
    found = cheapest(spec, EngineConfig(), targets, parallel=(1,), step_tokens=(2048,))
    assert len(found) == 1
    best = found[0]
    assert best.num_devices > 1
    assert best.figures["good_share"] >= 0.99
    fewer = dataclasses.replace(spec, replicas=best.num_devices - 1)
    engine = EngineConfig.from_flat({"max_num_batched_tokens": 2048})
    assert Simulation(fewer.fleet(engine), fewer.clients(), targets).run()["good_share"] < 0.99


def long_job(arrival: float, prompt_len: int, output_len: int, token: int = 1) -> Job:
    return Job(arrival, ((token, prompt_len),), output_len, 7)


def test_a_prompt_that_is_computed_apart_is_not_computed_again() -> None:
    """A prompt of 512 tokens takes 8 steps of 64 there, then 0.25 s on its way; its last block is computed here."""
    transfer = Transfer(0.125, 0.125 / 512)
    apart = simulate(Listed([long_job(0, 512, 4)]), num_replicas=2, num_prefill=1, transfer=transfer)
    prompt = 8 * (0.0078125 + 64 / 65536) + 1 / 131072
    first = 0.0078125 + 16 / 65536 + 1 / 131072
    assert apart.figures["ttft"]["max"] == prompt + 0.25 + first
    assert apart.figures["requests"] == 1
    stats = [replica.engine.stats() for replica in apart.simulation.replicas]
    assert [one.num_prompt_tokens for one in stats] == [512, 16]
    assert [one.num_output_tokens for one in stats] == [1, 4]


def test_answers_do_not_wait_for_prompts_that_are_computed_apart() -> None:
    jobs = [long_job(0, 32, 100, 1), *(long_job(0.1 * number, 480, 2, number) for number in range(2, 8))]
    sizes = SIZES._replace(max_num_batched_tokens=512)
    together = simulate(Listed(list(jobs)), sizes=sizes, num_replicas=1)
    apart = simulate(Listed(list(jobs)), sizes=sizes, num_replicas=2, num_prefill=1)
    assert apart.figures["requests"] == together.figures["requests"] == 7
    assert apart.figures["itl"]["p99"] < 0.7 * together.figures["itl"]["p99"]
    assert apart.simulation.replicas[0].engine.stats().num_prompt_tokens == 6 * 480


def test_of_the_replicas_some_must_be_left_for_answers() -> None:
    for count in (-1, 2):
        spec = SimulationSpec("tiny", "h200", "chat", 10, replicas=2, prefill_replicas=count)
        with pytest.raises(ConfigError, match="prefill_replicas"):
            spec.fleet(EngineConfig())
