"""The step loop: decide, compute, take note."""

from __future__ import annotations

import time
from collections import Counter, deque

from octavo.engine.scheduler import Scheduler
from octavo.errors import RunnerError
from octavo.types import EngineStats, Grammars, Masks, Output, Pending, Plan, Proposer, Request, Runner


class NoGrammars:
    """Every token is allowed everywhere."""

    def masks(self, plan: Plan) -> Masks:
        return {}

    def advance(self, outputs: list[Output]) -> None:
        pass


class NoProposer:
    """Nobody guesses."""

    def propose(self, plan: Plan) -> None:
        pass


class Engine:
    """Runs requests to their end, a step at a time.

    ``depth`` is how many steps may be submitted before the first of them is waited for. With 2, the next
    step is decided while the device computes this one; nothing else differs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        grammars: Grammars | None = None,
        proposer: Proposer | None = None,
        depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.grammars: Grammars = grammars or NoGrammars()
        self.proposer: Proposer = proposer or NoProposer()
        self.depth = depth
        self.in_flight: deque[tuple[Plan, Pending]] = deque()

    def add(self, request: Request) -> None:
        """Accept ``request``; raises ``RequestError`` if it could never be served."""
        self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Forget a request; it gives no more output. Nothing happens when there is none with this id."""
        self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """Run one iteration: schedule, execute, commit. Returns what it has to tell."""
        started = time.perf_counter()
        while len(self.in_flight) < self.depth and (plan := self.scheduler.schedule()):
            self.in_flight.append((plan, self.runner.submit(plan)))  # the forward pass starts; no wait
        if not self.in_flight:
            return []
        plan, pending = self.in_flight.popleft()
        masks = self.grammars.masks(plan)  # CPU work beside the forward pass
        try:
            sampled = pending.sample(masks)  # the one place that waits for the device
        except RunnerError as error:
            return self.scheduler.fail(plan, error)  # tried again in parts; only who is guilty ends
        outputs = self.scheduler.commit(plan, sampled)  # append tokens, free blocks, finish
        self.grammars.advance(outputs)
        self.proposer.propose(plan)  # drafts for the next step
        self.scheduler.note_step(plan, time.perf_counter() - started)
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters as of now; O(1)."""
        return self.scheduler.snapshot()

    def check(self) -> None:
        """Assert that all bookkeeping agrees; for tests and for finding out what went wrong."""
        self.scheduler.check()
        num_in_flight = Counter(item.seq for plan, _ in self.in_flight for item in plan)
        for seq in [*self.scheduler.running.values(), *self.scheduler.leaving, *num_in_flight]:
            assert seq.num_in_flight == num_in_flight[seq], "steps in flight are miscounted"
        block_size = self.scheduler.cache.block_size
        for plan, _ in self.in_flight:
            for item in plan:
                end = item.start + len(item.tokens) + len(item.drafts)
                assert len(item.seq.block_table) * block_size >= end, "blocks were taken back while in flight"
