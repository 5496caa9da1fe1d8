"""Token budget of a step, and whether it is prefill-only, from all settings and policies that limit steps."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import SchedulerSettings
from octavo.engine.interval import DecodeInterval
from octavo.engine.mixed_steps import MixedSteps
from octavo.engine.pace import Pace
from octavo.engine.policies.policy import Policy
from octavo.types import Plan


class StepBudget:
    """At most ``max_num_batched_tokens``; fewer in mixed steps, and under a limit on ITL.

    ``waiting`` is the policy, which may have ITL targets of its own.
    """

    def __init__(self, settings: SchedulerSettings, max_num_batched_tokens: int, waiting: Policy) -> None:
        self.waiting = waiting
        self.mixed_steps = MixedSteps(settings.max_num_mixed_tokens, max_num_batched_tokens)
        self.interval = DecodeInterval(settings.decode_interval or 1)
        self.pace = Pace(settings.max_itl) if settings.max_itl or waiting.has_targets else None

    def of_step(self, num_running: int, num_cut: int, prompts_can_go: Callable[[], bool]) -> tuple[int, bool]:
        """Token budget of the next step, and whether decodes are left out of it; to be called exactly once per step.

        ``num_cut`` of the running sequences are still in prefill. ``prompts_can_go`` returns whether any prompt can be
        computed; it is called only if needed.
        """
        prompts_only = self.interval.leaves_out(prompts_can_go)
        budget = self.mixed_steps.budget(num_running, num_running if prompts_only else num_cut, len(self.waiting))
        if self.pace is not None:
            budget = self.pace.budget(num_running, budget, self.waiting.seconds_left())
        return budget, prompts_only

    def admits(self, num_running: int) -> bool:
        """Whether one more sequence may run in addition to ``num_running`` others."""
        return self.pace is None or self.pace.admits(num_running, self.waiting.targets())

    def learn(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """Record that a step over ``plan``, of ``num_tokens`` in total, took ``seconds``."""
        if self.pace is not None:
            self.pace.learn(plan, num_tokens, seconds)
