"""What each step computes and how long it takes, for ``octavo simulate`` to learn from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.errors import ConfigError, RunnerError
from octavo.types import Masks, Pending, Plan, Runner, Sampled

REST = 0.05
"""Seconds."""


class StepWork(NamedTuple):
    """What the time of a step depends on."""

    tokens: int
    rows: int
    """Positions after which a token is sampled."""
    context: int
    """Cached positions read: the sum of the sequences' ends."""
    pairs: int
    """Pairs of a query and a key, over all sequences."""
    idle: int = 0
    """1 where no step before it was under way: nothing hides what it takes to start one."""
    rested: int = 0
    """1 where none has been for REST seconds or longer: what caches held is gone, and clocks are low."""


def work_of(plan: Plan) -> StepWork:
    """What ``plan`` asks of a device."""
    chunks = [item for item in plan if len(item.tokens) > 1 or item.drafts]
    num_singles = len(plan) - len(chunks)
    context = sum([item.start for item in plan]) + num_singles
    pairs = context
    tokens, rows = num_singles, len(plan)
    for item in chunks:
        count = len(item.tokens) + len(item.drafts)
        tokens += count
        rows += len(item.drafts) if item.samples else -1
        context += count
        pairs += (count - 1) * item.start + count * (count + 1) // 2
    return StepWork(tokens, rows, context, pairs)


Note = Callable[[StepWork, float], None]
"""Takes what a step computed, and its seconds."""


class TimedRunner:
    """Another runner, whose steps are timed from one result to the next, so that all around them is counted in.

    A step that goes on with nobody of the step before may follow a pause: it counts from where it was submitted, and
    what the host takes from a result to the next submission is added, as when it last did so with nothing under way.
    Beside a step that is, it may take its time. Where ``wake`` told of its first request, it counts from there at the
    latest, so that taking requests in is in it as well.
    """

    def __init__(self, runner: Runner, note: Note, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runner = runner
        self.note = note
        self.clock = clock
        self._members: set[int] = set()
        """Sequences of the step submitted last."""
        self._done_at = 0.0
        self._woken_at: float | None = None
        self._between = 0.0
        """Seconds of the host from a result to the next submission."""
        self._follows_result = False
        self._num_under_way = 0

    def wake(self) -> None:
        """A request is about to be taken in."""
        if self._woken_at is None and not self._num_under_way:
            self._woken_at = self.clock()

    def submit(self, plan: Plan) -> TimedStep:
        work, submitted_at = work_of(plan), self.clock()
        if not self._num_under_way:
            work = work._replace(idle=1, rested=int(submitted_at - self._done_at >= REST))
        members = {item.seq.id for item in plan}
        goes_on = not members.isdisjoint(self._members)
        self._members = members
        if goes_on and self._follows_result and not self._num_under_way:
            self._between = submitted_at - self._done_at
        self._follows_result = False
        since = None
        if not goes_on:
            since = submitted_at - self._between
            since = since if self._woken_at is None else min(since, self._woken_at)
        self._woken_at = None
        pending = self.runner.submit(plan)
        self._num_under_way += 1
        return TimedStep(self, work, since, pending)

    def finish(self, step: TimedStep, has_failed: bool = False) -> None:
        """The result of ``step`` is there, or none will be."""
        self._num_under_way -= 1
        if has_failed:
            return
        now = self.clock()
        began = self._done_at if step.since is None else max(self._done_at, step.since)
        self._done_at = now
        self._follows_result = True
        self.note(step.work, now - began)


class TimedStep:
    """A submitted step."""

    __slots__ = ("pending", "runner", "since", "work")

    def __init__(self, runner: TimedRunner, work: StepWork, since: float | None, pending: Pending) -> None:
        self.runner = runner
        self.work = work
        self.since = since
        """When it began at the latest; ``None`` where it goes on with the step before."""
        self.pending = pending

    @property
    def is_started(self) -> bool:
        return self.pending.is_started

    def sample(self, masks: Masks) -> list[Sampled]:
        try:
            sampled = self.pending.sample(masks)
        except RunnerError:
            self.runner.finish(self, has_failed=True)
            raise
        self.runner.finish(self)
        return sampled


def logged(runner: Runner, path: str | None) -> Runner:
    """``runner``, with each step added to the file ``path``, if one is given, as a JSON line; raises ``ConfigError``.

    Lines are whole, however this process ends.
    """
    if path is None:
        return runner
    try:
        file = Path(path).expanduser().open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"step_log: cannot write {path}: {error.strerror}") from None

    def note(work: StepWork, seconds: float) -> None:
        file.write(msgspec.json.encode({**work._asdict(), "seconds": round(seconds, 9)}) + b"\n")

    return TimedRunner(runner, note)
