"""A simulated device: computes nothing, only advances time."""

from __future__ import annotations

from octavo.engine.step_times import REST, work_of
from octavo.types import Masks, Plan, Sampled
from octavo_fleet.sim.clock import Clock
from octavo_fleet.sim.cost_model import CostModel

DECIDING = 0.0002
"""Host seconds per step while the device computes another; without overlap they are part of the step's cost."""
NOTHING = Sampled([])
"""Result of an item that samples nothing; the scheduler only reads it."""


MAX_ANSWERS = 1024
"""Cache size, larger than the number of running requests."""


class Answers(dict[int, Sampled]):
    """Results by sampled token; immutable, so one object serves all steps of a request."""

    def __missing__(self, token: int) -> Sampled:
        if len(self) == MAX_ANSWERS:
            self.clear()
        made = self[token] = Sampled([token])
        return made


class SimRunner:
    """Executes steps one after another on ``clock``, each with the duration given by ``cost``.

    The token that a request samples is its seed: the workload chooses it, so that a later turn can repeat it.
    """

    def __init__(self, cost: CostModel, clock: Clock) -> None:
        self.cost = cost
        self.clock = clock
        self.free_at = 0.0
        """Time when the device has finished all submitted steps."""
        self.busy_seconds = 0.0
        self.answers = Answers()

    def submit(self, plan: Plan) -> SimStep:
        work = work_of(plan)
        if self.free_at <= self.clock.now:
            work = work._replace(idle=1, rested=int(self.clock.now - self.free_at >= REST))
        else:
            self.clock.now += DECIDING
        seconds = self.cost.seconds(work)
        self.free_at = max(self.free_at, self.clock.now) + seconds
        self.busy_seconds += seconds
        return SimStep(plan, self.free_at, self)


class SimStep:
    """A submitted step, done at ``done_at``."""

    __slots__ = ("done_at", "plan", "runner")
    is_started = True

    def __init__(self, plan: Plan, done_at: float, runner: SimRunner) -> None:
        self.plan = plan
        self.done_at = done_at
        self.runner = runner

    def sample(self, masks: Masks) -> list[Sampled]:
        clock, answers = self.runner.clock, self.runner.answers
        clock.now = max(clock.now, self.done_at)
        return [answers[item.seq.request.seed] if item.samples else NOTHING for item in self.plan]
