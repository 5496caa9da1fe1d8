"""What a scheduling policy decides, and what all policies have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.waiting import WaitingQueue
from octavo.types import Order, Plan, Sampled, Sequence

DEFAULT_AGEING = 30.0
"""Seconds of waiting that outweigh one level of priority, or 1,000 tokens."""


@dataclass(frozen=True)
class Surroundings:
    """What a policy may look at."""

    cache: KVCache
    max_num_seqs: int
    settings: SchedulerSettings
    clock: Callable[[], float]
    """Seconds, on the same scale as ``Request.arrival``."""


class Policy(WaitingQueue):
    """The queue of those who wait, with the rules by which they are served.

    A policy says whose turn it is (``first``), and may close the batch to everybody (``is_closed``), ask one of
    those who run to give up its place (``who_yields``), and choose who is preempted when blocks run out
    (``choose_victim``). The scheduler decides all else, so that no policy can break a rule of the cache.

    ``Sequence.order`` is the place of a sequence among those who run: total, and fixed while it runs. The first
    in this order is never preempted for blocks, which is why every policy gets its work done. A policy whose
    orders do not all come before some later arrival's in the end would starve somebody.
    """

    name: ClassVar[str]
    makes_place: ClassVar[bool] = False
    """Whether ``who_yields`` ever names anybody. Then it is asked at every step while somebody waits."""
    charges: ClassVar[bool] = False
    """Whether ``charge`` wants to hear of every step."""

    has_targets: ClassVar[bool] = False
    """Whether ``seconds_left`` and ``targets`` ever have any."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__()
        self.around = around
        self.ageing = around.settings.policy_ageing or DEFAULT_AGEING
        self.num_arrived = 0

    def arrive(self, seq: Sequence) -> None:
        """``seq`` is here for the first time."""
        self.num_arrived += 1
        seq.order = self.place(seq, self.num_arrived)
        self.push(seq)

    def place(self, seq: Sequence, number: int) -> Order:
        """The order of ``seq``, which comes as number ``number``; no two may be equal."""
        return (number,)

    def arrival(self, seq: Sequence) -> float:
        """When ``seq`` came, in seconds."""
        return seq.request.arrival or self.around.clock()

    def admit(self, seq: Sequence) -> None:
        """``seq``, which was first, now runs. It has its blocks."""
        self.remove(seq.id)

    def leave(self, seq: Sequence) -> None:
        """``seq`` no longer runs: it ended, or it was preempted and is pushed back next."""

    def is_closed(self, running: dict[int, Sequence]) -> bool:
        """Whether nobody may join those who run."""
        return False

    def favours(self, candidates: list[Sequence]) -> Sequence:
        """Whose prompt goes on first, of those that did not fit into one step, and the first in line."""
        return min(candidates, key=lambda seq: seq.order)

    def who_yields(self, seq: Sequence, running: dict[int, Sequence]) -> Sequence | None:
        """Who of those who run gives up its place so that ``seq``, which is first in line, comes in."""
        return None

    def seconds_left(self) -> Iterable[float]:
        """For those who wait for a token and have a target: the time that their next one may take."""
        return ()

    def targets(self) -> Iterable[float]:
        """Seconds that those who run, and the first in line, want each token to take, if they want any."""
        return ()

    def choose_victim(self, candidates: Iterator[Sequence]) -> Sequence | None:
        """Who is preempted for want of blocks; the candidates come youngest first."""
        return next(candidates, None)

    def charge(self, plan: Plan, sampled: list[Sampled]) -> None:
        """A step brought these results."""
