"""Which policies there are, and whose turn it is under each."""

from __future__ import annotations

import pytest

from octavo.config import POLICY_NAMES, EngineConfig, SchedulerSettings, settings
from octavo.engine.policies import POLICIES
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.types import Request
from tests.engine.making import make_engine, make_request, planned, run_to_end


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_choice_exists_and_every_policy_can_be_chosen() -> None:
    (choices,) = [item.choices for item in settings(EngineConfig) if item.name == "scheduling_policy"]
    assert set(POLICIES) == set(choices) == set(POLICY_NAMES)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fairest' is not one of fcfs, priority"):
        make_engine(policy="fairest")


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"tenant_weights": "a=1"}, "tenant_weights needs scheduling_policy fair; it is fcfs"),
        ({"ttft_target": 1.0, "scheduling_policy": "fair"}, "ttft_target needs scheduling_policy deadline"),
        ({"tpot_target": 0.1}, "tpot_target needs scheduling_policy deadline; it is fcfs"),
        ({"tpot_target": 0.0, "scheduling_policy": "deadline"}, "tpot_target: must be at least"),
        ({"turn_tokens": 4}, "turn_tokens needs scheduling_policy decode-round-robin"),
        ({"policy_ageing": 4.0}, "policy_ageing needs scheduling_policy priority or"),
        ({"scheduling_policy": "longest-prefix", "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"max_itl": 0}, "max_itl: must be at least"),
    ],
)
def test_settings_that_would_mean_nothing_are_refused(flat: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(flat)


def turns(policy: str, requests: list[Request], **chosen: object) -> list[int]:
    """The ids of ``requests``, which come while another runs alone, in the order in which they are admitted."""
    clock = Clock()
    engine, runner = make_engine(
        num_blocks=400,
        max_num_seqs=1,
        max_num_batched_tokens=400,
        settings=SchedulerSettings(scheduling_policy=policy, **chosen),  # type: ignore[arg-type]
        clock=clock,
    )
    engine.add(make_request(99, prompt=[7] * 40, max_tokens=3, tenant="z"))
    engine.step()
    for request in requests:
        clock.now = request.arrival or clock.now
        engine.add(request)
    clock.now += 0.01
    run_to_end(engine)
    seen = [item.seq.id for plan in runner.plans for item in plan if item.seq.id != 99]
    return list(dict.fromkeys(seen))


def test_first_come_first_served() -> None:
    assert turns("fcfs", [make_request(n, priority=-n, prompt=9 - n) for n in (3, 1, 2)]) == [3, 1, 2]


def test_priority_and_its_ageing() -> None:
    low, high = make_request(1, priority=1, arrival=100.0), make_request(2, priority=0, arrival=109.0)
    assert turns("priority", [low, high], policy_ageing=10.0) == [2, 1]
    assert turns("priority", [low, high], policy_ageing=8.0) == [1, 2], "it waited for more than a level's worth"
    assert turns("priority", [make_request(5), make_request(4)]) == [5, 4]


def test_shortest_first_and_its_ageing() -> None:
    long, short = make_request(1, prompt=300, arrival=100.0), make_request(2, prompt=100, arrival=101.0)
    assert turns("shortest-first", [long, short], policy_ageing=10.0) == [2, 1]
    assert turns("shortest-first", [long, short], policy_ageing=4.0) == [1, 2]


def test_longest_prefix_counts_what_is_cached_when_it_is_asked() -> None:
    other = make_request(1, prompt=30)
    known = make_request(2, prompt=[*[7] * 36, 1])
    assert turns("longest-prefix", [other, known]) == [2, 1]
    # Neither is known at first; the third makes the second known.
    maker, made = make_request(3, prompt=[8] * 40, arrival=100.0), make_request(2, prompt=[*[8] * 36, 1], arrival=100.2)
    assert turns("longest-prefix", [maker, make_request(1, arrival=100.1), made]) == [3, 2, 1]


def test_the_earliest_deadline_is_first_but_late_requests_give_way() -> None:
    relaxed, urgent = make_request(1, ttft_target=5.0), make_request(2, ttft_target=1.0)
    assert turns("deadline", [relaxed, urgent]) == [2, 1]
    late = make_request(3, ttft_target=0.001)
    assert turns("deadline", [late, *(make_request(n) for n in range(4, 9))]) == [4, 5, 3, 6, 7, 8]
    assert turns("deadline", [make_request(1), late], ttft_target=0.002) == [3, 1], (
        "all are late: the order of deadlines"
    )


def test_a_late_sequence_that_was_preempted_is_resumed_first() -> None:
    clock = Clock()
    engine, _ = make_engine(settings=SchedulerSettings(scheduling_policy="deadline"), clock=clock)
    policy = engine.scheduler.waiting
    engine.add(make_request(0))
    preempted = policy.first()
    policy.admit(preempted)
    preempted.first_scheduled = clock.now
    clock.now += 5
    policy.push(preempted)
    engine.add(make_request(1))
    assert policy.first() is preempted


def test_the_sequence_with_the_longest_tpot_target_is_preempted() -> None:
    def victim_of(targets: dict[int, float]) -> int:
        settings = SchedulerSettings(scheduling_policy="deadline", tpot_target=0.5)
        engine, _ = make_engine(num_blocks=9, block_size=2, settings=settings)
        for number in range(3):
            engine.add(make_request(number, prompt=4, max_tokens=12, tpot_target=targets.get(number, 0.0)))
        while not engine.stats().num_preemptions:
            engine.step()
            engine.check()
        (preempted,) = {0, 1, 2} - set(engine.scheduler.running)
        run_to_end(engine)
        return preempted

    assert victim_of({}) == 2, "the youngest"
    assert victim_of({2: 0.4}) == 1
    assert victim_of({1: 0.4}) == 2
    assert victim_of({2: 0.4, 1: 0.3}) == 2
    assert victim_of({0: 9.0, 2: 0.4}) == 1, "the first in the order is never preempted"


def test_the_tenant_with_least_goes_first() -> None:
    requests = [make_request(n, tenant="a", prompt=8) for n in (1, 2, 3)] + [make_request(4, tenant="b", prompt=8)]
    assert turns("fair", requests) == [1, 4, 2, 3]


def test_turns_go_round() -> None:
    engine, runner = make_engine(
        max_num_seqs=2, settings=SchedulerSettings(scheduling_policy="decode-round-robin", turn_tokens=3)
    )
    for number in range(4):
        engine.add(make_request(number, max_tokens=9))
    outputs = run_to_end(engine)
    firsts = [
        min(step for step, plan in enumerate(runner.plans) for item in plan if item.seq.id == n) for n in range(4)
    ]
    assert max(firsts) <= 4, "everybody begins soon"
    assert all(sum(len(output.tokens) for output in outputs[n]) == 9 for n in range(4))
    assert engine.stats().num_preemptions >= 4


def test_turns_end_only_while_a_sequence_waits() -> None:
    engine, _ = make_engine(max_num_seqs=2, policy="decode-round-robin")
    engine.add(make_request(0, max_tokens=100))
    run_to_end(engine)
    assert engine.stats().num_preemptions == 0


def test_a_static_batch_stays_as_it_is() -> None:
    engine, runner = make_engine(max_num_seqs=2, policy="static")
    for number in range(4):
        engine.add(make_request(number, max_tokens=2 + number))
    run_to_end(engine)
    batches = [tuple(item.seq.id for item in plan) for plan in runner.plans]
    assert list(dict.fromkeys(batches)) == [(0, 1), (1,), (2, 3), (3,)]


@pytest.mark.parametrize(("victim", "gone"), [("youngest", 2), ("auto", 2), ("cheapest", 1), ("largest", 2)])
def test_the_victim_does_not_depend_on_the_order_of_admission(victim: str, gone: int) -> None:
    engine, _ = make_engine(num_blocks=10, block_size=2, settings=SchedulerSettings(preemption_victim=victim))
    for number, prompt in enumerate((6, 2, 6)):
        engine.add(make_request(number, prompt=prompt, max_tokens=12))
    while not engine.stats().num_preemptions:
        engine.step()
        engine.check()
    (preempted,) = {0, 1, 2} - set(engine.scheduler.running)
    assert preempted == gone
    run_to_end(engine)


def test_an_unknown_victim_is_refused() -> None:
    with pytest.raises(ConfigError, match="preemption_victim"):
        EngineConfig.from_flat({"preemption_victim": "oldest"})


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    engine, runner = make_engine(num_blocks=400, max_num_batched_tokens=20, policy="priority")
    engine.add(make_request(0, prompt=200, max_tokens=2, priority=1))
    engine.step()
    engine.add(make_request(1, prompt=30, max_tokens=2))
    engine.step()
    assert planned(runner) == {0: 1, 1: 19}
    engine.step()
    assert planned(runner) == {0: 9, 1: 11}
    run_to_end(engine)


def test_scheduler_defaults_to_fcfs() -> None:
    engine, _ = make_engine()
    plain = Scheduler(engine.scheduler.cache, max_num_seqs=1, max_num_batched_tokens=1)
    assert plain.waiting.name == "fcfs"
