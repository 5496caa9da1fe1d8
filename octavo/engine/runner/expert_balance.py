"""Expert-parallel load balancing: experts move between ranks while they serve, a few between two steps.

Results do not depend on where an expert is, on GPUs but for the order of sums, so nothing else has to know.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.engine.protocols import Runner, SubmittedStep
from octavo.engine.runner.step_runner import StepRunner
from octavo.steps.messages import ExpertLoads, ExpertMove, MoveExperts, ReadExperts
from octavo.types import EngineStats, Plan

STEPS_BETWEEN_LOOKS = 64
MOST_BYTES = 64 << 20
"""Of the experts that are copied between two steps."""
LEAST_GAIN = 0.05
"""A change must lower the rows of the busiest rank by this share."""
CANDIDATES = 4
"""Slots of a rank that are tried."""
MOST_MIXTURES = 4
"""For which changes are searched at once."""


class Change(NamedTuple):
    """Slots that take other experts at once, and the rows of the busiest rank then."""

    slots: tuple[tuple[int, int, int], ...]
    """Rank, slot, expert."""
    busiest: float


class BalancedRunner:
    """A runner that looks at the experts now and then, and moves some before the next step."""

    def __init__(self, runner: Runner, messages: StepRunner, stats: EngineStats) -> None:
        """``messages``: the runner of the executor, behind whose steps messages are sent."""
        self._runner, self._messages, self._stats = runner, messages, stats
        self._num_steps = 0

    def submit(self, plan: Plan) -> SubmittedStep:
        """See ``Runner``."""
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_LOOKS == 0:
            self._balance()
        return self._runner.submit(plan)

    def _balance(self) -> None:
        loads: list[ExpertLoads] = self._messages.send(ReadExperts()).wait()
        moves = changes(loads, MOST_BYTES)
        self._stats.expert_imbalance = imbalance(loads)
        self._stats.num_moved_experts += len(moves)
        if moves:
            self._messages.send_behind(MoveExperts(moves))


def changes(loads: Sequence[ExpertLoads], most_bytes: int) -> list[ExpertMove]:
    """A change for each of the most unequal mixtures that gain by it: one, or more of so many bytes in all."""
    found, num_bytes = list[ExpertMove](), 0
    unequal = sorted(range(len(loads)), key=lambda index: -imbalance(loads[index : index + 1]))
    for index in unequal[:MOST_MIXTURES]:
        one = loads[index]
        change = better(one.counts, one.slots)
        if change is None:
            continue
        num_bytes += len(change.slots) * one.num_bytes
        if found and num_bytes > most_bytes:
            break
        found += [ExpertMove(index, *slot) for slot in change.slots]
    return found


def imbalance(loads: Sequence[ExpertLoads]) -> float:
    """Rows on the busiest rank over the mean of the ranks, in all mixtures together; 1 if there are none."""
    busiest = [max(rank_rows(one.counts, one.slots)) for one in loads]
    mean = sum(sum(one.counts) / len(one.slots) for one in loads)
    return sum(busiest) / mean if mean else 1.0


def rank_rows(counts: Sequence[int], slots: Sequence[Sequence[int]]) -> list[float]:
    """The rows of experts that each rank computes."""
    rows = [0.0] * len(slots)
    for expert, ranks in _holders(slots).items():
        _add(rows, ranks, counts[expert])
    return rows


def better(counts: Sequence[int], slots: Sequence[Sequence[int]]) -> Change | None:
    """The exchange of two experts, or the copy of one over a copy of another, that helps the busiest rank most."""
    rows, holders = rank_rows(counts, slots), _holders(slots)
    busiest = max(range(len(rows)), key=rows.__getitem__)
    best = Change((), rows[busiest] * (1 - LEAST_GAIN))
    hot_slots = sorted(_filled(slots[busiest]), key=lambda slot: -counts[slots[busiest][slot]])[:CANDIDATES]
    for rank in range(len(slots)):
        cold_slots = sorted(_filled(slots[rank]), key=lambda slot: counts[slots[rank][slot]])[:CANDIDATES]
        for from_slot, to_slot in itertools.product(hot_slots, cold_slots):
            hot, cold = slots[busiest][from_slot], slots[rank][to_slot]
            if rank in holders[hot]:  # no rank holds an expert twice
                continue
            swap = ((busiest, from_slot, cold), (rank, to_slot, hot))
            if busiest not in holders[cold]:
                found = _tried(rows, holders, counts, {hot: (busiest, rank), cold: (rank, busiest)})
                best = min(best, Change(swap, found), key=lambda change: change.busiest)
            if len(holders[cold]) > 1:
                found = _tried(rows, holders, counts, {hot: (None, rank), cold: (rank, None)})
                best = min(best, Change(swap[1:], found), key=lambda change: change.busiest)
    return best if best.slots else None


def _tried(
    rows: Sequence[float],
    holders: Mapping[int, Sequence[int]],
    counts: Sequence[int],
    moved: Mapping[int, tuple[int | None, int | None]],
) -> float:
    """The rows of the busiest rank when experts have gone from a rank to another; ``None``: there is no such."""
    changed = list(rows)
    for expert, (gone, come) in moved.items():
        _add(changed, holders[expert], -counts[expert])
        ranks = [*(rank for rank in holders[expert] if rank != gone), *([] if come is None else [come])]
        _add(changed, sorted(ranks), counts[expert])
    return max(changed)


def _holders(slots: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """The ranks that hold each expert, in their order."""
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(slots):
        for slot in _filled(experts):
            holders.setdefault(experts[slot], []).append(rank)
    return holders


def _filled(experts: Sequence[int]) -> list[int]:
    return [slot for slot, expert in enumerate(experts) if expert >= 0]


def _add(rows: list[float], ranks: Sequence[int], count: int) -> None:
    """Count the rows of an expert: its copies take turns, as many of them as there are ranks."""
    for turn in range(len(rows)):
        rows[ranks[turn % len(ranks)]] += count / len(rows)
