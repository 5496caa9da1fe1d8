"""Token budgets that are chosen by the cost of steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from unittest.mock import patch

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.scheduler import Scheduler
from octavo.engine.timing.step_budget import (
    FULL_ROWS,
    NUM_FIRST_TRIALS,
    STEPS_BETWEEN_FIRST_TRIALS,
    STEPS_BETWEEN_TRIALS,
)
from octavo.engine.timing.step_model import StepModel, StepWork, work_of
from octavo.sampling_params import SamplingParams
from octavo.types import Plan, Request, Scheduled, Sequence
from tests.engine.virtual import StepCost, VirtualEngine, VirtualProgress

MOST = 2048


@dataclass(frozen=True)
class CheapRows(StepCost):
    """Rows up to ``free`` cost nothing, as while weights are read."""

    free: int = 256
    per_pair: float = 0.0
    """Seconds of a query and a key of attention."""

    def seconds(self, plan: Plan) -> float:
        rows = sum(len(item.tokens) for item in plan)
        of_rows = self.base + self.per_token * max(0, rows - self.free) + self.per_sequence * len(plan)
        return of_rows + self.per_pair * work_of(plan).pairs


class Recorder(VirtualEngine):
    """Records the rows of each step that computes prompts beside decodes."""

    def __init__(self, cost: StepCost, settings: SchedulerSettings) -> None:
        super().__init__(settings, cost=cost, num_blocks=1 << 13, max_num_batched_tokens=MOST, depth=2)
        self.sizes: list[int] = []
        learn = self.engine.scheduler.note_step

        def note(plan: Plan, seconds: float) -> None:
            lengths = [len(item.tokens) for item in plan]
            if min(lengths) == 1 < max(lengths):
                self.sizes.append(sum(lengths))
            learn(plan, seconds)

        self.engine.scheduler.note_step = note  # type: ignore[method-assign]


def serve(cost: StepCost, settings: SchedulerSettings | None = None) -> tuple[list[int], dict[int, VirtualProgress]]:
    """Sizes of mixed steps while 16 sequences decode and long prompts come one by one."""
    engine = Recorder(cost, settings or SchedulerSettings())
    talkers = [Request(n, [n, 1, 2], SamplingParams(), 2000, arrival=1.0) for n in range(16)]
    prompts = [Request(100 + n, [5000 + n] * 4096, SamplingParams(), 2, arrival=1.5 + n / 4) for n in range(32)]
    told = engine.serve([*talkers, *prompts], until=9.5)
    return engine.sizes, told


def usual(sizes: list[int]) -> int:
    """The most frequent size once all have been tried."""
    late = sizes[len(sizes) // 2 :]
    return max(set(late), key=late.count)


@pytest.mark.slow
@pytest.mark.parametrize("free", [128, 256, 512])
def test_prompts_are_computed_where_rows_are_free(free: int) -> None:
    sizes, _ = serve(CheapRows(free=free))
    assert usual(sizes) == free


def test_steps_are_full_where_each_has_a_price() -> None:
    sizes, _ = serve(StepCost(base=0.02))
    assert usual(sizes) == MOST


@pytest.mark.parametrize(("given", "most_mixed"), [(None, 2048), (8192, 8192)])
def test_streams_are_held_up_by_no_more_tokens_than_a_graph_has_unless_asked_for(
    given: int | None, most_mixed: int
) -> None:
    """A prompt alone has all tokens of a step."""
    settings = SchedulerSettings(max_num_batched_tokens=given)
    engine = VirtualEngine(settings, cost=StepCost(base=0.02), num_blocks=1 << 13, max_num_batched_tokens=8192)
    alone, mixed = list[int](), list[int]()
    learn = engine.engine.scheduler.note_step

    def note(plan: Plan, seconds: float) -> None:
        lengths = [len(item.tokens) for item in plan]
        (mixed if min(lengths) == 1 < max(lengths) else alone).append(max(lengths))
        learn(plan, seconds)

    engine.engine.scheduler.note_step = note  # type: ignore[method-assign]
    first = Request(0, [7] * 20000, SamplingParams(), 4000, arrival=0.1)
    later = [Request(n, [n] * 20000, SamplingParams(), 2, arrival=20.0 + n) for n in range(1, 12)]
    engine.serve([first, *later], until=60.0)
    assert max(alone) == 8192
    assert most_mixed * 0.9 < max(mixed) <= most_mixed


def test_a_long_prompt_has_few_chunks() -> None:
    """Small chunks would be cheap, but for the prompt's context, which each of them reads again, and decodes do not."""
    budget, rng = Recorder(CheapRows(), SchedulerSettings()).engine.scheduler.step_budget, random.Random(1)
    for _ in range(2000):
        rows, context = rng.randrange(16, MOST), rng.randrange(40000)
        work = StepWork.of_decodes(rng.randrange(1, 17), context)._replace(tokens=rows, context=context + rows)
        work = work._replace(has_prompt=int(rows > 16), pairs=work.context + rng.randrange(1 << 20))
        budget.model.learn(work, 0.01 + 2e-5 * max(0, rows - 256) + 4e-7 * context)
    sequences = [Sequence(Request(n, [1] * 40000, SamplingParams(), 9)) for n in range(17)]
    decodes = [Scheduled(seq, 100, (1,), (), True, 0) for seq in sequences[:16]]
    budgets = []
    for start in (0, 32000):
        plan = [*decodes, Scheduled(sequences[16], start, (1,) * 256, (), False, 0)]
        budget.learn(plan, 272, 0.01 + 4e-7 * (1600 + start))
        budgets.append(usual([budget.of_step(17, 1, 0) for _ in range(200)]))
    assert budgets[0] == 256
    assert budgets[1] >= 1024


def test_other_budgets_are_tried_rarely() -> None:
    sizes, _ = serve(CheapRows())
    first = NUM_FIRST_TRIALS * STEPS_BETWEEN_FIRST_TRIALS * 12
    others = [size for size in sizes[first:] if size > 256]
    assert 0 < len(others) < 3 * len(sizes) / STEPS_BETWEEN_TRIALS


def test_at_first_large_budgets_are_tried_once() -> None:
    """Each such step delays all streams, which shows in the first minute of a server."""
    sizes, _ = serve(CheapRows())
    known = sizes[sizes.index(256) :]
    assert all(known.count(size) <= 1 for size in (768, 1024, 1536, MOST))


def test_large_steps_are_left_until_shorter_ones_were_tried() -> None:
    """Of a model whose decodes take 12 ms, 2,048 rows take 128: a gap in all streams, for hardly less a token."""
    budget = Recorder(CheapRows(), SchedulerSettings()).engine.scheduler.step_budget
    sequences = [Sequence(Request(n, [1] * 256, SamplingParams(), 64)) for n in range(16)]
    prompts = [Scheduled(seq, 0, (1,) * 256, (), True, 0) for seq in sequences]
    decodes = [Scheduled(seq, 300, (1,), (), True, 0) for seq in sequences]
    for plan, seconds in [(prompts[:8], 0.128), (prompts[8:], 0.128), *[(decodes, 0.012)] * 64]:
        budget.learn(plan, sum(len(item.tokens) for item in plan), seconds)
    assert max(budget.of_step(16, 8, 0) for _ in range(8)) < 1024


def test_the_limit_on_itl_holds_whatever_is_cheapest() -> None:
    _, told = serve(StepCost(base=0.02), SchedulerSettings(max_itl=0.04))
    gaps = [gap for n in range(16) for gap, at in zip(told[n].gaps, told[n].token_times, strict=False) if at > 4]
    assert sorted(gaps)[int(len(gaps) * 0.99)] <= 0.04


def test_equal_times_lead_to_equal_budgets() -> None:
    assert serve(CheapRows())[0] == serve(CheapRows())[0]


def test_with_nobody_decoding_steps_fill_the_device() -> None:
    engine = Recorder(CheapRows(), SchedulerSettings())
    engine.serve([Request(n, [n] * 4096, SamplingParams(), 1, arrival=1.0) for n in range(8)])
    assert not engine.sizes
    assert 8 * 4096 // MOST <= engine.engine.stats().num_steps <= 8 * 4096 // FULL_ROWS


@pytest.mark.parametrize(
    ("per_token", "per_pair", "worst"),
    [(3.7e-5, 0.0, 0.13), (2.3e-5, 1.1e-9, 0.12), (6e-6, 0.0, 0.06), (4e-6, 2e-10, 0.06)],
)
def test_a_short_question_waits_little_for_a_long_prompt_on_a_gpu(
    per_token: float, per_pair: float, worst: float
) -> None:
    """Steps as of models of 8B and 1B; it was 0.73 s and 0.13 s when steps had 8,192 tokens. On an H200, attention is
    half of what a prompt of 32,000 tokens costs an 8B: its last tokens cost twice as much as its first."""

    def served(*more: Request) -> dict[int, VirtualProgress]:
        cost = CheapRows(100 * per_token, per_token, 2e-6, free=100, per_pair=per_pair)
        engine = VirtualEngine(SchedulerSettings(), cost=cost, num_blocks=1 << 14, max_num_batched_tokens=8192, depth=2)
        early = [Request(n, [n] * 60, SamplingParams(), 20, arrival=10.0 + n) for n in range(3)]
        early.append(Request(4, list(range(40_000, 60_000)), SamplingParams(), 2, arrival=1.0))
        prompt = Request(10, list(range(32_000)), SamplingParams(), 20, arrival=20.0)
        return engine.serve([*early, prompt, *more])

    times = [20.0 + 3900 * per_token * (n + 1) for n in range(5)]
    short = [Request(20 + n, [n] * 40, SamplingParams(), 4, arrival=time) for n, time in enumerate(times)]
    told = served(*short)
    assert max(told[request.id].ttft for request in short) < worst
    assert told[10].ttft < 1.05 * served()[10].ttft


@pytest.mark.parametrize("seconds", [0.003, 0.3])
def test_a_prompt_that_may_not_be_cut_starts_whatever_steps_take(seconds: float) -> None:
    """As texts of encoders, behind a short one that tells what a token costs."""
    cache = KVCache(1024, 16)
    scheduler = Scheduler(cache, max_num_seqs=64, max_num_batched_tokens=8192, chunked_prefill=False)
    scheduler.add(Request(0, [1] * 60, SamplingParams(), 1))
    plan = scheduler.schedule()
    scheduler.note_step(plan, seconds)
    scheduler.add(Request(1, [2] * 6000, SamplingParams(), 1))
    assert [len(item.tokens) for item in scheduler.schedule()] == [6000]


class ManyExperts(StepCost):
    """30 ms for the weights of all experts, which a hundred rows choose."""

    def seconds(self, plan: Plan) -> float:
        rows = sum(len(item.tokens) for item in plan)
        return super().seconds(plan) + 0.03 * min(1.0, rows / 100)


def test_steps_are_as_long_as_a_mixture_needs() -> None:
    """A thousand rows read its experts' weights as eight thousand do: 54 us a token, and 24."""
    cost = ManyExperts(0.005, 2e-5, 2e-6)
    engine = VirtualEngine(SchedulerSettings(), cost=cost, num_blocks=1 << 14, max_num_batched_tokens=8192, depth=2)
    starts = [(n, 10.0 * n) for n in range(1, 5)]
    prompts = [Request(n, list(range(n << 16, (n << 16) + 32_768)), SamplingParams(), 2, arrival=t) for n, t in starts]
    told = engine.serve(prompts)
    assert told[4].ttft < 1.3 * 4 * (0.035 + 8192 * 2e-5)


def test_drafts_do_not_tell_what_a_prompt_token_costs() -> None:
    """Many are computed at once while weights are read; by these, prompts would be free on a slow device, too."""
    cost = CheapRows(0.02, 0.005, 0.001, free=72)
    budget = Recorder(cost, SchedulerSettings()).engine.scheduler.step_budget
    sequences = [Sequence(Request(n, [1] * 9000, SamplingParams(), 9)) for n in range(9)]
    prompt = Scheduled(sequences[8], 0, (1,) * 512, (), False, 0)
    decode = Scheduled(sequences[0], 100, (1,), (), True, 0)
    drafted = [Scheduled(seq, 100, (1,), (2,) * 8, True, 0) for seq in sequences[:8]]
    for plan in [[prompt], [decode], drafted] * 50:
        budget.learn(plan, sum(len(item.tokens) + len(item.drafts) for item in plan), cost.seconds(plan))
    assert budget.of_step(1, 1, 0) < MOST / 4


def test_what_a_prompt_takes_alone_is_known_of_others() -> None:
    budget = Recorder(StepCost(), SchedulerSettings()).engine.scheduler.step_budget
    assert budget.seconds_alone(0, 1) == inf
    seq = Sequence(Request(0, [1] * FULL_ROWS, SamplingParams(), 9))
    budget.learn([Scheduled(seq, 0, tuple(seq.tokens), (), False, 0)], FULL_ROWS, 2.0)
    for of_pair in (0.0, 1.0):
        with patch.object(StepModel, "pair_seconds", of_pair):
            assert budget.seconds_alone(10, 100) == pytest.approx(200 / FULL_ROWS + of_pair * 100 * (10 + 50))


@pytest.mark.parametrize(("base", "longest_gap"), [(0.005, 0.6), (0.02, 1.4)])
def test_a_short_question_does_not_wait_for_a_long_prompt_on_a_slow_device(base: float, longest_gap: float) -> None:
    """Steps as of a small model on two cores. Others came before, so that it is known what steps take."""

    def served(*more: Request) -> dict[int, VirtualProgress]:
        cost = StepCost(base, 0.005, 0.001)
        engine = VirtualEngine(SchedulerSettings(), cost=cost, num_blocks=1024, max_num_seqs=8)
        early = [Request(n, [n] * 60, SamplingParams(), 20, arrival=1.0 + n) for n in range(3)]
        prompt = Request(10, list(range(9000)), SamplingParams(), 20, arrival=20.0)
        return engine.serve([*early, prompt, *more])

    alone = served()[10].ttft
    short = [Request(20 + n, [7000 + n] * 40, SamplingParams(), 30, arrival=22.03 + 5.1 * n) for n in range(5)]
    told = served(*short)
    assert max(told[request.id].ttft for request in short) < 1.3
    assert max(gap for request in short for gap in told[request.id].gaps) < longest_gap
    assert told[10].ttft < 1.1 * alone
    assert alone < 1.05 * (9000 * 0.005 + 18 * base)
