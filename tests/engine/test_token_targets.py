"""Targets for the time of each token: whom they bound, whom not, and who waits for them."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerSettings
from octavo.engine.timing import step_budget
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from tests.engine.making import make_engine, make_request
from tests.engine.test_max_itl import RoughCost
from tests.engine.virtual import StepCost, VirtualEngine, VirtualProgress
from tests.tiers import one_in

EVEN = StepCost()
DEADLINE = SchedulerSettings(scheduling_policy="deadline")


def ask(number: int, prompt: int, output: int, arrival: float, target: float = 0.0, ttft: float = 0.0) -> Request:
    tokens = [10_000 + number, *range(prompt - 1)]
    return Request(number, tokens, SamplingParams(), output, arrival=arrival, tpot_target=target, ttft_target=ttft)


def longest_gap(progress: VirtualProgress, since: float = 0.0, until: float = float("inf")) -> float:
    return max(gap for gap, when in zip(progress.gaps, progress.token_times, strict=False) if since <= when < until)


def tpot(progress: VirtualProgress) -> float:
    """Seconds for each token after the first, on average."""
    return (progress.token_times[-1] - progress.token_times[0]) / (len(progress.token_times) - 1)


def talk_beside_prompts(
    targets: dict[int, float], settings: SchedulerSettings, depth: int = 1, cost: StepCost = EVEN
) -> dict[int, VirtualProgress]:
    """Eight that talk, some with targets for their tokens, while long prompts come."""
    talkers = [ask(n, 3, 400, 1.0, targets.get(n, 0.0)) for n in range(8)]
    prompts = [ask(100 + n, 3000, 2, 1.5 + n / 12) for n in range(50)]
    engine = VirtualEngine(settings, cost=cost, max_num_batched_tokens=2048, num_blocks=8192, depth=depth)
    return engine.serve([*talkers, *prompts])


def with_target(seconds: float) -> SchedulerSettings:
    return SchedulerSettings(scheduling_policy="deadline", tpot_target=seconds)


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cost", [StepCost(), RoughCost()])
def test_the_tightest_target_of_decoding_sequences_is_met(depth: int, cost: StepCost) -> None:
    free = talk_beside_prompts({}, DEADLINE, depth, cost)
    assert tpot(free[3]) > 0.012, "there is nothing to bound"
    named = talk_beside_prompts({3: 0.008, 5: 0.02}, DEADLINE, depth, cost)
    by_default = talk_beside_prompts({5: 0.02}, with_target(0.008), depth, cost)
    for progress in (named, by_default):
        assert 0.007 < tpot(progress[3]) <= 0.008, "prompts have what is left of the time"
        times = progress[3].token_times
        assert all(times[n] - times[0] <= 0.0082 * n for n in range(30, len(times))), "and never much more"


def test_prompts_are_not_chunked_while_targets_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are of the average: who is ahead of them can bear a long step, unless no step may be long."""
    monkeypatch.setattr(step_budget, "EVEN_STEP", 0)  # as if shorter steps had been tried
    talker, prompt, measured = ask(0, 3, 300, 1.0, target=0.010), ask(1, 2000, 2, 2.0), ask(2, 1200, 1, 1.0)
    progress = VirtualEngine(DEADLINE, max_num_batched_tokens=2048).serve([talker, prompt, measured])
    assert longest_gap(progress[0]) > 0.040
    assert tpot(progress[0]) <= 0.010
    at_once = VirtualEngine(DEADLINE, max_num_batched_tokens=2048).serve([talker, measured, ask(1, 2000, 2, 1.06)])
    assert longest_gap(at_once[0], until=1.1) < 0.040, "there is less time yet"
    settings = SchedulerSettings(scheduling_policy="deadline", max_itl=0.012)
    limited = VirtualEngine(settings, max_num_batched_tokens=2048).serve([talker, prompt])
    assert longest_gap(limited[0]) < 0.025, "the first chunks are small, as nothing was measured"


def test_other_policies_know_no_targets() -> None:
    progress = talk_beside_prompts(dict.fromkeys(range(8), 0.008), SchedulerSettings())
    free = talk_beside_prompts({}, SchedulerSettings())
    assert [one.token_times for one in progress.values()] == [one.token_times for one in free.values()]


def test_without_targets_steps_are_as_under_no_limit() -> None:
    """The deadline policy learns what steps take, and makes no use of it until a request has a target."""
    requests = [ask(n, 400, 50, 1.0 + n / 100) for n in range(60)]
    progress, plain = (VirtualEngine(settings).serve(requests) for settings in (DEADLINE, SchedulerSettings()))
    assert [progress[n].token_times for n in progress] == [plain[n].token_times for n in progress]


def test_a_target_counts_while_its_request_waits_for_tokens_only() -> None:
    """Neither while its own prompt is computed, nor when it has ended, does it slice anything."""
    talker = ask(1, 2, 600, 1.0)
    targeted = ask(2, 3000, 60, 2.0, target=0.006)
    during, after = ask(3, 1900, 2, 2.08), ask(4, 1900, 2, 3.5)
    progress = VirtualEngine(DEADLINE, max_num_batched_tokens=2048).serve([talker, targeted, during, after])
    assert progress[2].token_times[0] < 2.08
    assert longest_gap(progress[1], since=1.99, until=2.05) > 0.040, "its own prompt is in few, long steps"
    assert 2.3 < progress[2].token_times[-1] < 3.5
    assert longest_gap(progress[1], since=progress[2].token_times[0], until=progress[2].token_times[-1]) <= 0.010
    assert longest_gap(progress[1], since=3.4) > 0.040


def test_no_sequence_is_admitted_that_would_break_targets() -> None:
    """A step takes 1 ms and one for each sequence: 9 ms, which is less than steps may differ by, bear eight."""
    cost = StepCost(0.001, 0.0, 0.001)
    first = [ask(n, 2, 300, 1.0 + n / 10, target=0.0105) for n in range(4)]
    later = [ask(10 + n, 2, 300, 1.4 + n / 10) for n in range(20)]
    progress = VirtualEngine(DEADLINE, cost=cost).serve([*first, *later])
    assert all(tpot(progress[n]) <= 0.0105 for n in range(4))
    end = max(progress[n].token_times[-1] for n in range(4))
    beside = [one for one in progress.values() if one.token_times[0] < end - 0.1]
    assert len(beside) > 6, "as many as possible"
    assert all(len(one.token_times) == 300 for one in progress.values()), "everybody is served in the end"
    assert max(tpot(progress[10 + n]) for n in range(20)) > 0.012, "and more at once when no target is left"


def test_a_sequence_with_a_target_is_admitted_when_it_can_be_met() -> None:
    cost = StepCost(0.001, 0.0, 0.001)
    crowd = [ask(n, 2, 100 + 40 * n, 1.0) for n in range(8)]
    progress = VirtualEngine(DEADLINE, cost=cost).serve([*crowd, ask(9, 2, 100, 1.2, target=0.006, ttft=9.0)])
    assert tpot(progress[9]) <= 0.006
    assert progress[9].ttft > 0.5, "it waited for the others"
    progress = VirtualEngine(DEADLINE, cost=cost).serve([*crowd, ask(9, 2, 100, 1.2, target=0.006, ttft=0.3)])
    assert 0.3 < progress[9].ttft < 0.4, "not for longer than its first token may take"


def test_the_lead_of_a_preempted_sequence_is_reset() -> None:
    """Its tokens are counted from when it comes back: it is not behind because it had to wait."""
    now = 100.0
    engine, _ = make_engine(settings=DEADLINE, clock=lambda: now)
    engine.add(make_request(0, max_tokens=50, tpot_target=0.01))
    policy = engine.scheduler.waiting
    seq = policy.first()
    for _ in range(2):
        engine.step()
        assert list(policy.seconds_left()) == [0.01]
        engine.scheduler._preempt(seq, by=seq)
        assert not list(policy.seconds_left())
        now += 1.0


def test_an_unreachable_target_costs_other_sequences_nothing() -> None:
    progress = talk_beside_prompts({3: 0.0001}, DEADLINE)
    free = talk_beside_prompts({}, DEADLINE)
    assert sum(tpot(progress[n]) for n in range(8)) < 1.05 * sum(tpot(free[n]) for n in range(8))
    assert max(progress[100 + n].ttft for n in range(20)) < 1.05 * max(free[100 + n].ttft for n in range(20))


@pytest.mark.slow
def test_sequences_without_targets_do_not_starve() -> None:
    """Requests with targets come as fast as they are served, and others among them are served as well."""
    cost = StepCost(0.001, 0.00001, 0.001)
    tight = [ask(n, 20, 50, 1.0 + n / 20, target=0.006) for n in range(400)]
    loose = [ask(1000 + n, 800, 20, 2.0 + n / 2) for n in range(10)]
    engine = VirtualEngine(DEADLINE, cost=cost)
    progress = engine.serve([*tight, *loose], until=20.0)
    assert engine.engine.stats().num_waiting > 5, "more come than can be served"
    assert all(len(progress[1000 + n].token_times) == 20 for n in range(10))


@pytest.mark.parametrize("depth", [1, 2])
def test_time_is_spent_once(depth: int) -> None:
    """Who is ahead by one long step does not get two of them because the first is still on its way."""
    talker, prompt = ask(0, 3, 200, 1.0, target=0.010), ask(1, 6000, 2, 1.07)
    progress = VirtualEngine(DEADLINE, max_num_batched_tokens=2048, depth=depth).serve([talker, prompt])
    times = progress[0].token_times
    assert longest_gap(progress[0]) > 0.030
    assert max(times[n] - times[0] - 0.010 * n for n in range(len(times))) <= 0.010
