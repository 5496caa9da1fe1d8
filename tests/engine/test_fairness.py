"""One tenant floods: what that does to another."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.config import OWNERS, POLICY_NAMES, SchedulerSettings
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from tests.engine.floods import (
    COST,
    FLOOD,
    FLOOD_OF_LONG_PROMPTS,
    HALF_SPEED,
    QUIET,
    TenantLoad,
    measure,
    serve,
    share_of,
)
from tests.engine.making import make_engine, make_request, planned, run_to_end
from tests.engine.virtual import VirtualEngine
from tests.tiers import nightly_after, one_in


def request(number: int, tenant: str = "", arrival: float = 1.0, prompt: int = 64, output: int = 32) -> Request:
    tokens = [5000 + number, *range(prompt - 1)]
    return Request(number, tokens, SamplingParams(), output, arrival=arrival, tenant=tenant)


@pytest.mark.slow
def test_a_flood_leaves_the_other_its_fair_share() -> None:
    fair_share, fcfs, fair = measure(["fcfs", "fair"])
    assert fair["quiet_ttft_ms"] <= 1.1 * fair_share["quiet_ttft_ms"]
    assert fair["quiet_tokens_per_second"] >= 0.9 * fair_share["quiet_tokens_per_second"]
    assert fair["quiet_finished"] == fair_share["quiet_finished"]
    assert fair["all_tokens_per_second"] >= 0.99 * fcfs["all_tokens_per_second"], "fairness costs next to nothing"
    assert fcfs["quiet_ttft_ms"] > 50 * fair["quiet_ttft_ms"], "the comparison would show nothing"


@pytest.mark.slow
def test_long_prompts_of_a_flood_are_sliced_for_the_other() -> None:
    fair_share, fair = measure(["fair"], FLOOD_OF_LONG_PROMPTS, max_itl=0.01)
    assert fair["quiet_ttft_ms"] <= 1.1 * fair_share["quiet_ttft_ms"]
    assert fair["quiet_tokens_per_second"] >= 0.9 * fair_share["quiet_tokens_per_second"]


@pytest.mark.slow
def test_a_tenant_alone_gets_everything() -> None:
    flood = TenantLoad("only", 100.0, 256, 64)
    totals = [sum(len(one.token_times) for one in serve(p, [flood]).progress.values()) for p in ("fcfs", "fair")]
    assert totals[0] == totals[1]


@pytest.mark.slow
def test_two_floods_share_by_weight() -> None:
    loads = [TenantLoad("a", 60.0, 256, 64), TenantLoad("b", 60.0, 256, 64)]
    for weights, share in ((None, 1.0), ("a=3", 3.0)):
        progress = serve("fair", loads, tenant_weights=weights).progress.values()
        served = {name: sum(len(one.token_times) for one in progress if one.request.tenant == name) for name in "ab"}
        assert served["a"] / served["b"] == pytest.approx(share, rel=0.1)


def test_idle_tenants_earn_no_credit() -> None:
    engine = VirtualEngine(SchedulerSettings(scheduling_policy="fair"), max_num_seqs=4)
    early = [request(number, "a", 1.0) for number in range(40)]
    late = [request(100 + number, tenant, 1.5) for number in range(20) for tenant in ("b",)]
    engine.serve(early + late)
    ends = {number: one.token_times[-1] for number, one in engine.progress.items()}
    assert max(ends[number] for number in range(30)) < max(ends[number] for number in range(100, 120))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_waiting_sequence_preempts_one_of_the_tenant_with_the_highest_load(depth: int) -> None:
    engine, runner = make_engine(max_num_seqs=4, policy="fair", depth=depth)
    for number in range(6):
        engine.add(make_request(number, max_tokens=40, tenant="flood"))
    for _ in range(3):
        engine.step()
    engine.add(make_request(9, max_tokens=40, tenant="quiet"))
    for _ in range(2 * depth):
        engine.step()
        engine.check()
    assert set(engine.scheduler.running) == {0, 1, 2, 9}, "the youngest of the flood made place"
    assert engine.stats().num_preemptions == 1, "and nobody else"
    assert 9 in planned(runner)
    run_to_end(engine)


@pytest.mark.parametrize("places", [3, 4])
def test_a_tenant_with_its_share_preempts_nothing(places: int) -> None:
    """Nor where one place is left over, which would go back and forth."""
    engine, _ = make_engine(max_num_seqs=places, policy="fair")
    for number in range(6):
        engine.add(make_request(number, max_tokens=8, tenant="ab"[number % 2]))
    run_to_end(engine)
    assert engine.stats().num_preemptions == 0


def test_tenants_are_forgotten() -> None:
    engine, _ = make_engine(policy="fair")
    for number in range(9000):
        engine.add(make_request(number, prompt=1, max_tokens=1, tenant=f"t{number}"))
        engine.abort(number)
    assert len(engine.scheduler.waiting.tenants) <= 4096  # type: ignore[attr-defined]
    engine.check()


@pytest.mark.parametrize("weights", ["a", "a=", "a=0", "a=-1", "=2", "a=inf", "a=nan", "a=x", "a=1e308", "a=1e-320"])
def test_bad_weights_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match="tenant_weights"):
        make_engine(settings=SchedulerSettings(scheduling_policy="fair", tenant_weights=weights))


@one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_request_starves(policy: str) -> None:
    """A request of the lowest rank under a policy is served while requests of higher rank never stop arriving."""
    disliked = Request(0, list(range(400)), SamplingParams(), 32, arrival=1.0, tenant="x", priority=2, ttft_target=5.0)
    shared = [7] * 320
    flood = [
        Request(1 + n, [*shared, n], SamplingParams(), 16, arrival=1.0 + n / 200, tenant="y", priority=1)
        for n in range(2400)
    ]
    ageing = 2.0 if policy in OWNERS["policy_ageing"] else None
    engine = VirtualEngine(
        SchedulerSettings(scheduling_policy=policy, policy_ageing=ageing), max_num_seqs=8, num_blocks=400
    )
    engine.serve([disliked, *flood], until=12.0)
    assert engine.engine.stats().num_waiting > 100, "there was no pressure"
    assert len(engine.progress[0].token_times) == 32


def test_the_reference_is_half_a_device() -> None:
    assert HALF_SPEED.base == 2 * COST.base
    assert (
        share_of(serve("fcfs", [QUIET]).progress, "quiet")["ttft"]
        < share_of(serve("fcfs", [QUIET], HALF_SPEED).progress, "quiet")["ttft"]
    )
    assert FLOOD.rate == 100 * QUIET.rate


def test_many_tenants_that_come_at_once_take_places_of_a_flood_in_one_step() -> None:
    engine, runner = make_engine(num_blocks=512, max_num_seqs=16, max_num_batched_tokens=256, policy="fair")
    for number in range(40):
        engine.add(make_request(number, max_tokens=40, tenant="flood"))
    engine.step()
    for number in range(10):
        engine.add(make_request(100 + number, max_tokens=4, tenant=f"quiet {number}"))
    engine.step()
    engine.check()
    assert {100 + number for number in range(10)} <= planned(runner).keys()
    assert engine.stats().num_preemptions == 10
    run_to_end(engine)


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", nightly_after(2, range(3)))
def test_a_tenant_below_its_share_has_a_place_within_two_steps(seed: int, depth: int) -> None:
    """Tenants that come at random, fewer than there are places, next to one that fills all of them."""
    rng, numbers, num_late = random.Random(seed), iter(range(10_000)), Counter[str]()
    places = rng.choice([8, 24])
    engine, runner = make_engine(
        num_blocks=4096, max_num_seqs=places, max_num_batched_tokens=256, policy="fair", depth=depth
    )
    scheduler, requests = engine.scheduler, list[Request]()

    def add(tenant: str, prompt: int, max_tokens: int) -> None:
        requests.append(make_request(next(numbers), prompt=prompt, max_tokens=max_tokens, tenant=tenant))
        engine.add(requests[-1])

    def waits(name: str) -> bool:
        return bool(scheduler.waiting.tenants[name].waiting)  # type: ignore[attr-defined]

    for _ in range(3 * places):
        add("flood", rng.randrange(1, 40), 50)
    for _ in range(150):
        tenants = Counter(seq.request.tenant for seq in [*scheduler.running.values(), *scheduler.promised.values()])
        names = scheduler.waiting.tenants  # type: ignore[attr-defined]
        num_late = Counter({name: num_late[name] + 1 for name in names if waits(name) and not tenants[name]})
        assert max(num_late.values(), default=0) <= 2, num_late
        for _ in range(rng.choice([0, 0, 1, 1, 4])):
            if len({*tenants, *num_late}) < places // 2:
                add(name := f"quiet {rng.randrange(40)}", rng.randrange(1, 8), rng.randrange(1, 8))
                num_late.setdefault(name, 0)
        engine.step()
        engine.check()
    run_to_end(engine, 20_000)
    num_computed = sum(len(item.tokens) for plan in runner.plans for item in plan)
    num_needed = sum(len(request.prompt_tokens) + request.max_tokens - 1 for request in requests)
    num_preemptions = engine.stats().num_preemptions
    assert 20 < num_preemptions <= len(requests)
    assert num_computed - num_needed <= num_preemptions * engine.scheduler.cache.block_size, "more was computed again"


def test_equal_tenants_take_turns() -> None:
    """The order of their names does not matter: one that comes later waits for those that came before, no longer."""
    engine, runner = make_engine(max_num_seqs=1, policy="fair")
    names = ["c", "a", "d", "b"]
    for number, name in enumerate(names * 2):
        engine.add(make_request(number, max_tokens=1, tenant=name))
    run_to_end(engine)
    assert [item.seq.request.tenant for plan in runner.plans for item in plan] == names * 2


@pytest.mark.parametrize("aborted", ["promised", "yielding"])
def test_a_request_is_aborted_while_its_place_changes_hands(aborted: str) -> None:
    engine, _ = make_engine(max_num_seqs=4, policy="fair", depth=2)
    for number in range(6):
        engine.add(make_request(number, max_tokens=40, tenant="flood"))
    for _ in range(3):
        engine.step()
    for number in (10, 11):
        engine.add(make_request(number, max_tokens=4, tenant=f"quiet {number}"))
    engine.step()
    engine.check()
    yielding = {seq.id for seq in engine.scheduler.yielding}
    assert [*engine.scheduler.promised] == [10, 11]
    assert len(yielding) == 2
    gone = {10, 11} if aborted == "promised" else yielding
    for number in gone:
        engine.abort(number)
        engine.check()
    outputs = run_to_end(engine)
    ended = {number for number, own in outputs.items() if own[-1].finish_reason == "length"}
    assert ended == {*range(6), 10, 11} - gone
