"""Token budget of mixed steps."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerSettings
from octavo.engine.mixed_steps import FEW_RUNNING, FEW_WAITING, LARGE_WEIGHTS, MIXED_TOKENS, settle_mixed_steps
from tests.engine.making import make_engine, make_request

SHORT = SchedulerSettings(max_num_mixed_tokens=6)


def sizes_of_steps(settings: SchedulerSettings, depth: int = 1, others: int = 1, num_decoding: int = 1) -> list[int]:
    """The rows of each step with prefill, once the first sequences decode and prompts of 20 tokens each arrive."""
    engine, runner = make_engine(
        num_blocks=4000, max_num_seqs=100, max_num_batched_tokens=400, settings=settings, depth=depth
    )
    for number in range(num_decoding):
        engine.add(make_request(number, prompt=[7] * 10, max_tokens=60))
    while not any(item.start >= 10 for plan in runner.plans for item in plan):
        engine.step()
    before = len(runner.plans)
    for number in range(others):
        engine.add(make_request(1000 + number, prompt=[5] * 20, max_tokens=2))
    while engine.has_work:
        engine.step()
        engine.check()
    plans = [plan for plan in runner.plans[before:] if any(item.start < 20 and item.seq.id >= 1000 for item in plan)]
    return [sum(len(item.tokens) for item in plan) for plan in plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_prefill_with_a_small_decode_batch_takes_short_steps(depth: int) -> None:
    assert sizes_of_steps(SHORT, depth) == [6, 6, 6, 6]
    assert sizes_of_steps(SchedulerSettings(), depth) == [21]
    assert sizes_of_steps(SchedulerSettings(max_num_mixed_tokens=1000), depth) == [21]


def test_many_waiting_prompts_take_full_steps() -> None:
    assert sizes_of_steps(SHORT, others=FEW_WAITING)[0] == 6
    assert sizes_of_steps(SHORT, others=FEW_WAITING + 1)[0] == 1 + 20 * (FEW_WAITING + 1)


def test_prefill_with_a_large_decode_batch_takes_a_full_step() -> None:
    assert sizes_of_steps(SHORT, num_decoding=FEW_RUNNING)[0] == FEW_RUNNING + 1
    assert sizes_of_steps(SHORT, num_decoding=FEW_RUNNING + 1) == [FEW_RUNNING + 1 + 20]


def test_a_prefill_only_step_is_full() -> None:
    settings = SchedulerSettings(max_num_mixed_tokens=6, decode_interval=3)
    assert sizes_of_steps(settings) == [20]


def test_a_single_prompt_takes_full_steps() -> None:
    engine, runner = make_engine(max_num_batched_tokens=16, settings=SHORT)
    engine.add(make_request(0, prompt=[7] * 40, max_tokens=2))
    while engine.has_work:
        engine.step()
    assert [len(plan[0].tokens) for plan in runner.plans] == [16, 16, 8, 1]


def test_the_limit_on_a_gpu() -> None:
    assert settle_mixed_steps(SchedulerSettings(), LARGE_WEIGHTS - 1).max_num_mixed_tokens is None
    assert settle_mixed_steps(SchedulerSettings(), LARGE_WEIGHTS).max_num_mixed_tokens == MIXED_TOKENS
    assert settle_mixed_steps(SHORT, LARGE_WEIGHTS) is SHORT
