"""Where experts go: the busiest rank gets less to do, no expert is lost, and none is twice on a rank."""

from __future__ import annotations

import random

import pytest

from octavo.engine.runner.expert_balance import (
    LEAST_GAIN,
    MOST_MIXTURES,
    STEPS_BETWEEN_LOOKS,
    BalancedRunner,
    better,
    changes,
    imbalance,
    rank_rows,
)
from octavo.steps.messages import ExpertLoads, MoveExperts, ReadExperts
from octavo.types import EngineStats


def settled(counts: list[int], slots: list[list[int]]) -> tuple[list[list[int]], int]:
    """The slots after all changes that help, and their number."""
    for number in range(100):
        change = better(counts, slots)
        if change is None:
            return slots, number
        before = max(rank_rows(counts, slots))
        slots = [list(experts) for experts in slots]
        for rank, slot, expert in change.slots:
            slots[rank][slot] = expert
        assert max(rank_rows(counts, slots)) == pytest.approx(change.busiest)
        assert change.busiest <= before * (1 - LEAST_GAIN)
        assert {expert for experts in slots for expert in experts} - {-1} == set(range(len(counts)))
        assert all(len({*experts} - {-1}) == sum(expert >= 0 for expert in experts) for experts in slots)
    raise AssertionError("it does not settle")


@pytest.mark.parametrize("seed", range(6))
def test_ranks_get_about_as_much_to_do(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, each = rng.choice([2, 3, 4]), rng.choice([4, 8])
    counts = [int(100 * rng.paretovariate(1.5)) for _ in range(num_ranks * each)]
    slots = [list(range(rank * each, (rank + 1) * each)) for rank in range(num_ranks)]
    found, _ = settled(counts, slots)
    fair = max(max(counts), sum(counts) / num_ranks)
    assert max(rank_rows(counts, found)) < 1.35 * fair


def test_a_hot_expert_is_copied_over_copies_of_cold_ones() -> None:
    counts = [900, 10, 20, 30]
    slots = [[0, 1, 2], [2, 3, 1]]
    found, number = settled(counts, slots)
    assert number > 0
    assert all(0 in experts for experts in found)
    assert rank_rows(counts, found)[0] == pytest.approx(sum(counts) / 2, rel=0.1)


def test_equal_ranks_stay_as_they_are() -> None:
    assert better([5, 5, 5, 5], [[0, 1], [2, 3]]) is None
    assert better([0, 0], [[0], [1]]) is None
    assert imbalance([ExpertLoads([0, 0], [[0], [1]], 8)]) == 1


def test_copies_are_bounded_in_bytes_and_number() -> None:
    unequal = ExpertLoads([100, 100, 1, 1], [[0, 1], [2, 3]], num_bytes=10)
    moves = changes([unequal] * 9, most_bytes=1000)
    assert len({move.mixture for move in moves}) == MOST_MIXTURES
    assert len(changes([unequal] * 9, most_bytes=45)) == 4
    assert len(changes([unequal] * 9, most_bytes=10)) == 2, "one change, however large experts are"


def test_the_runner_looks_now_and_then_and_sends_moves_behind_the_steps_before() -> None:
    sent: list[object] = []

    class Reply:
        def wait(self) -> list[ExpertLoads]:
            return [ExpertLoads([100, 100, 1, 1], [[0, 1], [2, 3]], 10)]

    class Messages:
        def send(self, message: object) -> Reply:
            sent.append(message)
            return Reply()

        def send_behind(self, message: object) -> None:
            sent.append(message)

    class Own:
        def submit(self, plan: object) -> str:
            return "step"

    stats = EngineStats()
    runner = BalancedRunner(Own(), Messages(), stats)  # type: ignore[arg-type]
    for _ in range(STEPS_BETWEEN_LOOKS - 1):
        assert runner.submit([]) == "step"  # type: ignore[comparison-overlap]
    assert not sent
    runner.submit([])
    assert isinstance(sent[0], ReadExperts)
    assert isinstance(sent[1], MoveExperts)
    assert stats.num_moved_experts == len(sent[1].moves) == 2
    assert stats.expert_imbalance == pytest.approx(200 / 101)
