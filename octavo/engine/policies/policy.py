"""The interface of scheduling policies. The default policy is in ``fcfs.py``."""

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
class PolicyContext:
    """State that a policy may read."""

    cache: KVCache
    max_num_seqs: int
    settings: SchedulerSettings
    clock: Callable[[], float]
    """Seconds, on the same scale as ``Request.arrival``."""


class Policy(WaitingQueue):
    """The queue of waiting sequences, and the rules by which they are served.

    A policy chooses the next sequence to admit (``first``), and may close the batch to admissions (``is_closed``),
    preempt a running sequence for the first waiting one (``preempt_for``), and choose which sequence is preempted when
    blocks run out (``choose_victim``). All else is up to the scheduler, so that no policy can break a cache invariant.

    ``Sequence.order`` sorts running sequences: a total order, fixed while a sequence runs. The first in this order is
    never preempted for blocks, which guarantees progress under every policy. To avoid starvation, the order of every
    sequence must come before those of all arrivals from some later time on.
    """

    name: ClassVar[str]
    preempts_for_waiting: ClassVar[bool] = False
    """Whether ``preempt_for`` can return a sequence. It is then called in every step while sequences wait."""
    charges: ClassVar[bool] = False
    """Whether ``charge`` must be called for every step."""

    overtakes: ClassVar[bool] = False
    """Whether a short prompt may be computed before a long one that comes first, see ``Scheduler``."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__()
        self.context = context
        self.ageing = context.settings.policy_ageing or DEFAULT_AGEING
        self.num_arrived = 0

    def arrive(self, seq: Sequence) -> None:
        """Queue ``seq`` for the first time."""
        self.num_arrived += 1
        seq.order = self.place(seq, self.num_arrived)
        self.push(seq)

    def place(self, seq: Sequence, number: int) -> Order:
        """The order of ``seq``, the ``number``-th arrival; no two may be equal."""
        raise NotImplementedError

    def arrival(self, seq: Sequence) -> float:
        """Arrival time of ``seq``, in seconds of the clock."""
        return seq.request.arrival or self.context.clock()

    def admit(self, seq: Sequence) -> None:
        """Remove ``seq``, which is first and has its blocks: it runs from now on."""
        self.remove(seq.id)

    def leave(self, seq: Sequence) -> None:
        """Record that ``seq`` no longer runs: it ended, or it was preempted and ``push`` follows."""

    def is_closed(self, running: dict[int, Sequence]) -> bool:
        """Whether no sequence may be admitted."""
        return False

    def prefill_rank(self, seq: Sequence) -> Order:
        """Of the sequences whose prompts did not fit into the last step and the first waiting one, the prompt of that
        with the least rank is computed first."""
        return seq.order

    def preempt_for(self, seq: Sequence, running: dict[int, Sequence]) -> Sequence | None:
        """The running sequence to preempt so that ``seq``, the first waiting one, can be admitted; or ``None``."""
        return None

    def seconds_left(self) -> Iterable[float]:
        """For each running sequence with a TPOT target: the seconds that its next token may take."""
        return ()

    def targets(self) -> Iterable[float]:
        """TPOT targets, in seconds, of the running sequences and of the first waiting one, if they have any."""
        return ()

    def choose_victim(self, candidates: Iterator[Sequence]) -> Sequence | None:
        """The sequence to preempt when blocks run out; ``candidates`` come youngest first. By default the youngest."""
        return next(candidates, None)

    def charge(self, plan: Plan, sampled: list[Sampled]) -> None:
        """Account for the results of a step."""
