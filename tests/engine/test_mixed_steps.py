"""Steps in which somebody decodes, and how much they compute."""

from __future__ import annotations

from octavo.config import SchedulerSettings
from octavo.engine.mixed_steps import LARGE_WEIGHTS, MIXED_TOKENS, mixed_tokens_on_gpu
from tests.engine.making import make_engine, make_request

SHORT = SchedulerSettings(max_num_mixed_tokens=6)


def sizes_of_steps(settings: SchedulerSettings, depth: int) -> list[list[int]]:
    """The rows of each sequence in each step: a prompt of 40 alone, and one of 20 that comes when that decodes."""
    engine, runner = make_engine(max_num_batched_tokens=16, settings=settings, depth=depth)
    engine.add(make_request(0, prompt=[7] * 40, max_tokens=30))
    while not any(item.start >= 40 for plan in runner.plans for item in plan):
        engine.step()
    engine.add(make_request(1, prompt=[5] * 20, max_tokens=2))
    while engine.has_work:
        engine.step()
        engine.check()
    return [[len(item.tokens) for item in plan] for plan in runner.plans]


def test_a_lone_prompt_takes_whole_steps_and_one_beside_others_short_ones() -> None:
    for depth in (1, 2):
        sizes = sizes_of_steps(SHORT, depth)
        assert sizes[:3] == [[16], [16], [8]]
        mixed = [step for step in sizes if len(step) == 2]
        assert mixed[:4] == [[1, 5]] * 4, depth


def test_without_a_limit_of_their_own_they_are_as_long_as_others() -> None:
    assert [1, 15] in sizes_of_steps(SchedulerSettings(), 1)
    assert sizes_of_steps(SchedulerSettings(max_num_mixed_tokens=100), 1) == sizes_of_steps(SchedulerSettings(), 1)


def test_the_limit_on_a_gpu() -> None:
    def settled(weight_bytes: float, seqs: int = 256, tokens: int = 2048, mixed: int | None = None) -> int | None:
        return mixed_tokens_on_gpu(SchedulerSettings(max_num_mixed_tokens=mixed), weight_bytes, seqs, tokens)

    assert settled(LARGE_WEIGHTS - 1) is None
    assert settled(LARGE_WEIGHTS) == MIXED_TOKENS
    assert settled(LARGE_WEIGHTS, seqs=1000) == 2000
    assert settled(LARGE_WEIGHTS, tokens=512) == 512
    assert settled(LARGE_WEIGHTS, mixed=300) == settled(1, mixed=300) == 300
