"""The number of drafts: never more than pay, by what was measured."""

from __future__ import annotations

import random

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculative.draft_choice import STEPS_BETWEEN_MEASUREMENTS, AcceptanceRates, DraftChoice
from octavo.engine.speculative.drafter_switch import LONGEST_REST, TRIAL, DrafterSwitch
from octavo.engine.speculative.proposer import DeviceDrafts, Proposal
from octavo.engine.speculative.speculation import Speculation
from octavo.engine.timing.step_costs import LEAST_SEEN, StepCosts
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import NO_DRAFTER
from octavo.types import Plan, Sampled, Scheduled, Sequence, Status
from tests.engine.making import make_engine, make_request
from tests.oracle import expected_output
from tests.speculating import FromFunction
from tests.tiers import nightly_after, one_in

MAX_DRAFTS = 4


def sequence(number: int = 0) -> Sequence:
    return Sequence(make_request(number, prompt=[1, 2], max_tokens=100))


def taught(choice: DraftChoice, seq: Sequence, num_drafts: int, num_accepted: int, seconds: float) -> None:
    """One step of ``seq`` alone, with its result."""
    plan: Plan = [Scheduled(seq, 2, (1,), (7,) * num_drafts, True, seq.epoch)]
    choice.learn(plan, [Sampled([7] * num_accepted + [8])])
    choice.note_step(plan, seconds)


@pytest.mark.parametrize("cost_of_row", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.95])
def test_what_is_chosen_is_worth_its_cost(cost_of_row: float, rate: float) -> None:
    """Over a long run of one sequence, the tokens per second are at least nearly those of the best fixed number."""
    rng, choice, seq = random.Random(1), DraftChoice(MAX_DRAFTS), sequence()
    num_tokens, spent = 0, 0.0
    for _ in range(3000):
        chosen = {} if choice.pauses else choice.choose({seq: Proposal((7,) * MAX_DRAFTS)}, 1)
        num_drafts, num_accepted = len(chosen.get(seq, ())), 0
        while num_accepted < num_drafts and rng.random() < rate:
            num_accepted += 1
        seconds = 1 + cost_of_row * num_drafts
        taught(choice, seq, num_drafts, num_accepted, seconds * rng.uniform(0.95, 1.05))
        num_tokens, spent = num_tokens + 1 + num_accepted, spent + seconds
    best = max(sum(rate**i for i in range(count + 1)) / (1 + cost_of_row * count) for count in range(MAX_DRAFTS + 1))
    assert num_tokens / spent >= 0.95 * best
    assert num_tokens / spent >= 0.98, "slower than without speculation"


@one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(("num_seqs", "cost_of_drafting"), [(1, 0.05), (1, 0.3), (1, 1.0), (16, 0.05), (16, 0.3)])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.95])
def test_a_drafter_that_does_not_pay_makes_no_drafts(num_seqs: int, cost_of_drafting: float, rate: float) -> None:
    """A step's drafts are made by the step before it, at a price, whether or not they are then verified; and a drafter
    that makes none costs something, too, unless it rests."""
    rng, sequences = random.Random(1), [sequence(number) for number in range(num_seqs)]
    for seq in sequences:
        seq.decodes, seq.status = True, Status.RUNNING
    speculation = Speculation(DeviceDrafts(MAX_DRAFTS), MAX_DRAFTS, DraftChoice(MAX_DRAFTS, on_device=True))
    num_tokens, spent, num_made, cost_of_row, cost_of_filling = 0, 0.0, MAX_DRAFTS, 0.02, 0.05
    for _ in range(3000):
        drafts_of = speculation.choose(sequences)
        every = [drafts_of.get(seq, ()) for seq in sequences]
        assert all(len(drafts) <= max(num_made, 0) for drafts in every)
        num_made = speculation.num_proposed
        accepted = [next((i for i in range(len(drafts)) if rng.random() >= rate), len(drafts)) for drafts in every]
        seconds = 1 + cost_of_row * sum(map(len, every)) / num_seqs
        if num_made != NO_DRAFTER:
            seconds += cost_of_filling + cost_of_drafting * num_made / MAX_DRAFTS
        plan: Plan = [
            Scheduled(seq, 2, (1,), drafts, True, seq.epoch, num_proposed=num_made)
            for seq, drafts in zip(sequences, every, strict=True)
        ]
        speculation.learn(plan, [Sampled([7] * count + [8]) for count in accepted])
        speculation.note_step(plan, seconds * rng.uniform(0.95, 1.05))
        num_tokens, spent = num_tokens + num_seqs + sum(accepted), spent + seconds
    speeds = [
        sum(rate**i for i in range(count + 1))
        / (1 + cost_of_filling + cost_of_row * count + cost_of_drafting * count / MAX_DRAFTS)
        for count in range(MAX_DRAFTS + 1)
    ]
    speed = num_tokens / num_seqs / spent
    assert speed >= 0.94 * max(speeds)
    assert speed >= 0.98, "slower than without speculation"


def test_a_drafter_as_large_as_the_model_rests() -> None:
    """Though it is always right: its steps take several times as long, and what they take without it is found out."""
    seq = sequence()
    seq.decodes, seq.status = True, Status.RUNNING
    speculation = Speculation(DeviceDrafts(MAX_DRAFTS), MAX_DRAFTS, DraftChoice(MAX_DRAFTS, on_device=True))
    num_tokens, spent = 0, 0.0
    for _ in range(3000):
        drafts = speculation.choose([seq]).get(seq, ())
        num_made = speculation.num_proposed
        seconds = 1.0 if num_made == NO_DRAFTER else 2.0 + num_made
        plan: Plan = [Scheduled(seq, 2, (1,), drafts, True, seq.epoch, num_proposed=num_made)]
        speculation.learn(plan, [Sampled([7] * (1 + len(drafts)))])
        speculation.note_step(plan, seconds)
        num_tokens, spent = num_tokens + 1 + len(drafts), spent + seconds
    assert num_tokens / spent > 0.95


def test_a_drafter_runs_again_once_its_drafts_are_accepted() -> None:
    """After a long time without success each trial begins anew, and a good one keeps the drafter."""
    filling, seq, ran = StepCosts(), sequence(), list[bool]()
    for _ in range(LEAST_SEEN):
        filling.note(1, 1.05)
    use = DrafterSwitch(filling, StepCosts(filling.drift))
    for number in range(8000):
        ran.append(use.runs())
        is_good = number >= 4000
        drafts = (7,) if ran[-1] else ()
        plan: Plan = [Scheduled(seq, 2, (1,), drafts, True, 0, num_proposed=1 if ran[-1] else NO_DRAFTER)]
        use.learn(plan, [Sampled([7, 8] if is_good and ran[-1] else [8])])
        use.note_step(plan, 1.2 if ran[-1] else 1.0)
    assert ran[:TRIAL] == [True] * TRIAL
    assert 0.03 < sum(ran[:4000]) / 4000 < 0.1
    assert all(ran[4000 + LONGEST_REST + TRIAL :])


def test_a_full_batch_gets_drafts_only_where_they_survive() -> None:
    choice, sequences = DraftChoice(MAX_DRAFTS), [sequence(number) for number in range(8)]
    for _ in range(40):
        plan: Plan = [Scheduled(seq, 2, (1,), (7,) * MAX_DRAFTS, True, 0) for seq in sequences]
        choice.learn(plan, [Sampled([7] * 4 + [8] if seq.id < 2 else [8]) for seq in sequences])
    for num_rows in range(8, 41):
        for _ in range(LEAST_SEEN):
            choice.costs.note(num_rows, 1 + 0.05 * (num_rows - 8))
    chosen = choice.choose({seq: Proposal((7,) * MAX_DRAFTS) for seq in sequences}, 8)
    assert {seq.id: len(drafts) for seq, drafts in chosen.items()} == {0: MAX_DRAFTS, 1: MAX_DRAFTS}


def test_the_least_sure_drafts_are_left_out_by_the_proposers_own_chances() -> None:
    choice, seq = DraftChoice(MAX_DRAFTS), sequence()
    for num_rows in (1, 2, 3, 4, 5):
        for _ in range(LEAST_SEEN):
            choice.costs.note(num_rows, 1 + 0.3 * (num_rows - 1))
    proposal = Proposal((1, 2, 3, 4), (0.9, 0.9, 0.1, 0.9))
    assert choice.choose({seq: proposal}, 1) == {seq: (1, 2)}


def test_a_step_without_drafts_comes_now_and_then() -> None:
    choice = DraftChoice(MAX_DRAFTS)
    assert sum(choice.pauses for _ in range(10 * STEPS_BETWEEN_MEASUREMENTS)) == 10


def test_costs_are_interpolated_and_follow_drift() -> None:
    costs = StepCosts()
    assert costs.seconds(1) is None
    for num_rows, seconds in ((1, 1.0), (5, 3.0)):
        costs.note(num_rows, 50.0)  # kernels are compiled
        for _ in range(LEAST_SEEN):
            costs.note(num_rows, seconds)
    assert costs.seconds(1) == pytest.approx(1, rel=0.05)
    assert costs.seconds(3) == pytest.approx(2, rel=0.05)
    assert costs.seconds(100) == costs.seconds(5)
    for _ in range(100):
        costs.note(1, 2.0)
    drifted = costs.seconds(5)
    assert costs.seconds(1) == pytest.approx(2, rel=0.01)
    assert drifted is not None
    assert drifted > 3, "what is not measured drifts along"
    costs.note(1, 1e6)
    assert costs.seconds(1) == pytest.approx(2, rel=0.2), "one outlier changed much"


def test_a_sequence_is_judged_by_its_own_past_first() -> None:
    rates, good, bad = AcceptanceRates(2), sequence(0), sequence(1)
    for _ in range(50):
        rates.learn(good, 2, 2)
        rates.learn(bad, 2, 0)
    assert rates.survivals(good, 2)[1] > 0.8
    assert rates.survivals(bad, 2)[0] < 0.1
    for _ in range(300):
        rates.learn(bad, 0, 0)
    assert rates.survivals(bad, 1)[0] > 0.3, "it would never be tried again"
    rates.forget(bad)
    assert 0.3 < rates.survivals(bad, 1)[0] < 0.7


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_may_limit_its_drafts(depth: int) -> None:
    engine, runner = make_engine(depth=depth)
    engine.scheduler.speculation = Speculation(FromFunction(lambda seq: [1, 2, 3, 4]), MAX_DRAFTS)
    for number, limit in enumerate((None, 0, 2)):
        params = SamplingParams(max_tokens=12, num_speculative_tokens=limit)
        engine.add(make_request(number, max_tokens=12, params=params))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
        engine.check()
    drafts = dict.fromkeys(tokens, 0)
    for plan in runner.plans:
        for item in plan:
            drafts[item.seq.id] = max(drafts[item.seq.id], len(item.drafts))
    assert drafts == {0: 4, 1: 0, 2: 2}
    assert all(tokens[n] == expected_output(make_request(n, max_tokens=12))[0] for n in tokens)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_was_slow_once_is_tried_again(on_device: bool) -> None:
    """Steps with drafts that took twice as long when they were first seen, on a machine that was busy just then."""
    rng, seq = random.Random(2), sequence()
    seq.decodes, seq.status = True, Status.RUNNING
    choice = DraftChoice(MAX_DRAFTS, on_device)
    speculation = Speculation(DeviceDrafts(MAX_DRAFTS), MAX_DRAFTS, choice)
    choice.costs.note(1, 1.0)
    for num_rows in range(1 if on_device else 2, MAX_DRAFTS + 2):
        for _ in range(LEAST_SEEN):
            choice.drafting_costs.note(num_rows, 2.5)
    counts, num_made = list[int](), MAX_DRAFTS
    for _ in range(300):
        drafts = speculation.choose([seq]).get(seq, ())
        num_made, num_accepted = speculation.num_proposed, 0
        while num_accepted < len(drafts) and rng.random() < 0.6:
            num_accepted += 1
        plan: Plan = [Scheduled(seq, 2, (1,), drafts, True, seq.epoch, num_proposed=num_made)]
        speculation.learn(plan, [Sampled([7] * num_accepted + [8])])
        speculation.note_step(plan, (1 + 0.05 * len(drafts) + 0.05 * num_made) * rng.uniform(0.95, 1.05))
        counts.append(len(drafts))
    assert sum(counts[-100:]) > 100


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("slower", nightly_after(2, [3, 200, 20]))
@pytest.mark.parametrize("num_seqs", [1, 16])
def test_costs_from_while_kernels_were_compiled_are_measured_again(num_seqs: int, slower: int) -> None:
    """The first steps with drafts after a start wait for their kernels, and the drafter rests; later it is found to
    pay."""
    rng, sequences = random.Random(3), [sequence(number) for number in range(num_seqs)]
    for seq in sequences:
        seq.decodes, seq.status = True, Status.RUNNING
    speculation = Speculation(DeviceDrafts(MAX_DRAFTS), MAX_DRAFTS, DraftChoice(MAX_DRAFTS, on_device=True))
    counts, elapsed = list[int](), 0.0
    for _ in range(6000):
        chosen = speculation.choose(sequences)
        drafts_of, accepted = [chosen.get(seq, ()) for seq in sequences], []
        num_made = speculation.num_proposed
        for drafts in drafts_of:
            accepted.append(next((i for i in range(len(drafts)) if rng.random() >= 0.7), len(drafts)))
        seconds = 1 + 0.02 * sum(map(len, drafts_of)) / num_seqs
        if num_made != NO_DRAFTER:
            seconds += 0.05 + 0.2 * num_made / MAX_DRAFTS
        if elapsed < 2000 and (num_made > 0 or any(drafts_of)):
            seconds *= slower
        plan: Plan = [
            Scheduled(seq, 2, (1,), drafts, True, seq.epoch, num_proposed=num_made)
            for seq, drafts in zip(sequences, drafts_of, strict=True)
        ]
        speculation.learn(plan, [Sampled([7] * count + [8]) for count in accepted])
        speculation.note_step(plan, seconds * rng.uniform(0.95, 1.05))
        elapsed += seconds
        counts.append(sum(map(len, drafts_of)))
    assert sum(count > 0 for count in counts[-1000:]) > 900


def test_a_size_that_was_slow_once_is_tried_again_where_a_smaller_one_pays() -> None:
    """Steps with one draft pay, and would hide for long that those with all of them pay more."""
    rng, seq = random.Random(4), sequence()
    seq.decodes, seq.status = True, Status.RUNNING
    choice = DraftChoice(MAX_DRAFTS, on_device=True)
    speculation = Speculation(DeviceDrafts(MAX_DRAFTS), MAX_DRAFTS, choice)
    for _ in range(LEAST_SEEN):
        choice.costs.note(1, 1.0)
        choice.drafting_costs.note(2, 1.2)
        choice.drafting_costs.note(MAX_DRAFTS + 1, 8.0)
    counts = list[int]()
    for _ in range(120):
        drafts = speculation.choose([seq]).get(seq, ())
        num_made, num_accepted = speculation.num_proposed, 0
        while num_accepted < len(drafts) and rng.random() < 0.75:
            num_accepted += 1
        plan: Plan = [Scheduled(seq, 2, (1,), drafts, True, seq.epoch, num_proposed=num_made)]
        speculation.learn(plan, [Sampled([7] * num_accepted + [8])])
        speculation.note_step(plan, (1.1 + 0.05 * len(drafts)) * rng.uniform(0.95, 1.05))
        counts.append(len(drafts))
    assert sum(counts[-40:]) > 40 * (MAX_DRAFTS - 1)


@pytest.mark.parametrize("pays", [True, False])
def test_steps_with_prompts_verify_all_drafts_or_none(pays: bool) -> None:
    """Drafts of the executor's drafter: all, and in addition to the prompts' rows, if their rows cost less than the
    tokens are worth that they promise."""
    scheduler = Scheduler(
        KVCache(600, 4, enable_prefix_caching=False),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        speculation=Speculation(DeviceDrafts(MAX_DRAFTS), MAX_DRAFTS, DraftChoice(MAX_DRAFTS, on_device=True)),
    )
    for number in (0, 1):
        scheduler.add(make_request(number, prompt=[1, 2], max_tokens=900))
    mixed = list[Plan]()
    for number in range(160):
        if number % 8 == 7:
            scheduler.add(make_request(number, prompt=[1] * 40, max_tokens=1))
        plan = scheduler.schedule()
        mixed += [plan] if any(len(item.tokens) > 2 for item in plan) else []
        num_rows = sum(len(item.tokens) + len(item.drafts) for item in plan)
        assert num_rows <= 64
        accepted = [len(item.drafts) * pays for item in plan]
        results = zip(plan, accepted, strict=True)
        scheduler.commit(plan, [Sampled([7] * (1 + count) if item.samples else []) for item, count in results])
        scheduler.note_step(plan, 1.0 + 0.01 * num_rows)
    late = [sum(len(item.drafts) for item in plan) for plan in mixed[-5:]]
    assert late == ([2 * MAX_DRAFTS] * 5 if pays else [0] * 5)
    assert all(sum(len(item.tokens) for item in plan) >= 10 for plan in mixed), "drafts left too little to prompts"
