"""Work and duration of each step, recorded for ``octavo simulate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.engine.protocols import Runner, SubmittedStep
from octavo.engine.timing.step_model import StepWork, work_of
from octavo.errors import ConfigError, RunnerError
from octavo.types import Masks, Plan, Sampled

REST = 0.05
"""Seconds without a step after which the device counts as rested."""


Note = Callable[[StepWork, float], None]
"""Records the work of a step and its duration in seconds."""


class TimedRunner:
    """Wraps a runner and times its steps from one result to the next, so that host work between steps is included.

    A step that shares no sequence with the previous one may follow a pause: it is timed from its submission, plus the
    host's time from a result to the next submission, as last measured with no other step in flight (with one in
    flight, the host may take its time). If ``wake`` announced its first request, it is timed from there at the latest,
    which includes adding the requests.
    """

    def __init__(self, runner: Runner, note: Note, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runner = runner
        self.note = note
        self.clock = clock
        self._members: set[int] = set()
        """Ids of the sequences of the last submitted step."""
        self._done_at = 0.0
        self._woken_at: float | None = None
        self._between = 0.0
        """Host seconds from a result to the next submission."""
        self._follows_result = False
        self._num_under_way = 0

    def wake(self) -> None:
        """Announce that a request is about to be added."""
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
        """Record that ``step`` has a result, or has failed."""
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

    def __init__(self, runner: TimedRunner, work: StepWork, since: float | None, pending: SubmittedStep) -> None:
        self.runner = runner
        self.work = work
        self.since = since
        """Latest time at which it began; ``None`` if it shares a sequence with the previous step."""
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
    """``runner``, with each step appended to the file ``path``, if given, as a JSON line; raises ``ConfigError``.

    Each line is written by one unbuffered call, so lines are complete even if the process is killed.
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
