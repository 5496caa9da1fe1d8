"""Token budget of a step, chosen by the measured cost of steps.

The prompt tokens of a mixed batch, of prefill and decode, may be any number. Small steps may be cheaper,
since a step of decodes reads all weights anyway; large ones finish prompts sooner, share fixed costs, and may use
better kernels. Which is better depends on the model, the device and the load, so it is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import numpy as np

from octavo.config import SchedulerSettings
from octavo.engine.policies.policy import Policy
from octavo.engine.timing.step_model import Array, StepModel, StepWork, work_of
from octavo.steps.graph_shapes import MIXED_ROWS, NO_DRAFTER
from octavo.types import Plan

MARGIN = 0.9
"""Predicted time of a step, at most, as a share of the limit: step times vary."""
LEAST_CHUNK = 16
"""Prompt tokens that a step may always compute, so that prompts finish."""
MOST_GROWTH = 2
"""Under a limit a step is at most so much larger than any before it: what larger ones take is not known."""
WAITING_WEIGHT = 1.5
"""Cost of a sequence that waits for its prompt, relative to its share of a decode step: users wait for first tokens."""
TOLERANCE = 0.01
"""Of all budgets whose cost of a prompt token is within this of the least, the smallest is taken, for even streams."""
EVEN_STEP = 4
"""A step that takes more than so many steps of its decodes alone is a gap in all streams. None is chosen before all
shorter ones were tried: until then costs are interpolated, and those of large steps look lower than they are."""
NUM_FIRST_TRIALS, STEPS_BETWEEN_FIRST_TRIALS = 1, 2
"""Each budget is tried so often at first, in every so many steps: a step with many prompts delays all streams."""
DECODES_BETWEEN_SAMPLES = 4
"""Steps of decodes alone are alike: each so many-th is learned from, which saves the host time."""
BEARABLE_SECONDS, LONG_SECONDS = 0.25, 0.5
"""A step with prompts that would take longer than the second is made so small that it takes the first: four tokens a
second are about as fast as people read, and a request that comes meanwhile waits no longer for its first step."""
SHORT_SECONDS, FULL_ROWS = 0.02, 1024
"""A step of prompts alone takes so long, or longer if it would have fewer rows: with these, products of matrices are
about as fast on a GPU as with more, and a slow device never computes so many."""
FULL_COST, COST_OF_HALF, GROWTH_OF_COSTS = 1.15, 1.25, 1.002
"""What a token may cost then, relative to steps of any size; what it is taken to cost with half as many rows, which are
tried where attention to a long context costs as much as all else; and what such a cost becomes with each step, until it
is measured again."""
LEAST_SHARE = 8
"""A step's rows take at least one in so many parts of its time, whatever is predicted of attention."""
LEAST_ROWS, MANY_LEFT = 256, 8192
"""Prompt tokens of a step of that length in which a short prompt is computed, at least, and those that the long one
has left: with fewer, one step more is no small part of what it takes."""
SLICING_COST = 0.03
"""But no smaller than that its fixed cost is this share of what its prompt tokens cost."""
LEAST_TELLING = 32
"""Prompt tokens of a step, at least, that tells what a prompt token costs."""
STEPS_BETWEEN_TRIALS = 32
"""Later the next smaller and the next larger budget are tried in turn, once in so many steps."""


class DraftRoom(NamedTuple):
    """How many drafts a mixed step may verify, and what they cost."""

    num_drafts: int
    """Most drafts of all sequences."""
    draft_seconds: Callable[[int], float]
    """Seconds of each draft, if there are so many."""


class StepBudget:
    """Chooses the budget that computes prompts at the least cost.

    A step without decodes has no more of ``max_num_batched_tokens`` than fill the device. A mixed batch has at most as
    many as the largest CUDA graph, unless the setting says otherwise: more would add to the inter-token latency.

    With d sequences that decode and p that wait for their prompts, a step of c prompt tokens adds its time to that of
    a step of decodes alone, and delays p sequences by one more step. So the cost of a prompt token is
    ``(seconds(step) - seconds(decodes) + WAITING_WEIGHT * seconds(decodes) * p / (d + p)) / c``. In a closed loop of
    N = d + p clients, with a weight of 1, least cost is most tokens per second.

    Under a limit on ITL a step is not predicted to take longer than that. ``waiting`` is the policy, which may have ITL
    targets of its own.
    """

    def __init__(self, settings: SchedulerSettings, max_num_batched_tokens: int, waiting: Policy) -> None:
        self.waiting = waiting
        self.most = self.most_mixed = max_num_batched_tokens
        if settings.max_num_batched_tokens is None:
            self.most_mixed = min(self.most, MIXED_ROWS[-1])
        self.max_itl = settings.max_itl or inf
        self.model = StepModel(max_num_batched_tokens)
        self._context = self._decode_context = self._num_decoding = 0
        """Context of the last step, that of its sequences that decode, and how many they are."""
        self._num_proposed = NO_DRAFTER
        """Drafts of a sequence that the drafter made in the last step."""
        self._position = 0
        """Where the furthest prompt of the last step ended."""
        self._most_rows = 0
        """Rows of the largest step so far."""
        self._anyone_waits_for_tokens = False
        self._seconds_of_prompt_token = 0.0
        """In the last step that had enough of them, beyond those of its decodes or of one."""
        self._costs: dict[int, float] = {}
        """Least seconds of a prompt token in steps of prompts alone, by the bit length of the number of tokens, without
        attention to what is before the step."""
        self._num_steps = 0
        self._num_choices = 0
        self._num_trials = Counter[int]()

    def of_step(self, num_running: int, num_cut: int, num_free: int) -> int:
        """Token budget of the next step, at least one for each running sequence; to be called exactly once per step.

        ``num_cut`` of the running sequences are still in prefill, and ``num_free`` more sequences may run.
        """
        if not num_running or not self._anyone_waits_for_tokens:
            num_prompts = num_cut + len(self.waiting)
            return self._bearable(
                self._short(self.most, 0, self._full_rows(num_prompts, self._position if num_cut else 0)), 0
            )
        limit = MARGIN * min([self.max_itl, *self.waiting.seconds_left()])
        num_pending = num_cut + min(len(self.waiting), num_free)
        chooses = num_pending > 0 and num_cut < num_running and self.model.is_ready
        if not chooses and limit == inf:
            return self._bearable(self.most_mixed, num_running - num_cut) if num_pending > 0 else self.most_mixed
        curve = self.model.curve(num_running, self._context, self._position, self._num_proposed)
        budget = self._cheapest(curve, num_running, num_running - num_cut, num_pending) if chooses else self.most_mixed
        if num_pending > 0:
            budget = self._bearable(budget, num_running - num_cut)
        if limit < inf:
            num_rows = min(int(np.interp(limit, curve, self.model.knots)), MOST_GROWTH * self._most_rows)
            budget = min(budget, max(num_rows, num_running + LEAST_CHUNK))
        return budget

    def _bearable(self, budget: int, num_decoding: int) -> int:
        """``budget``, or less if a step of so many tokens would take long, ``num_decoding`` of them of decodes."""
        if not (seconds_each := self._seconds_of_prompt_token):
            return budget
        cheap = self._seconds_of_decodes(1) / (SLICING_COST * seconds_each)
        return min(budget, max(self._bearable_at_any_cost(budget, num_decoding), num_decoding + int(cheap)))

    def brief(self, budget: int, num_decoding: int, num_left: int) -> int:
        """``budget``, or less at any cost, for a single step in which a short prompt overtakes one of which so many
        tokens are left."""
        budget = self._bearable_at_any_cost(budget, num_decoding)
        return budget if num_left < MANY_LEFT else self._short(budget, num_decoding, LEAST_ROWS)

    def _bearable_at_any_cost(self, budget: int, num_decoding: int) -> int:
        fixed, seconds_each = self._seconds_of_decodes(max(1, num_decoding)), self._seconds_of_prompt_token
        if not seconds_each or fixed + seconds_each * (budget - num_decoding) <= LONG_SECONDS:
            return budget
        return min(budget, num_decoding + max(int((BEARABLE_SECONDS - fixed) / seconds_each), LEAST_CHUNK))

    def _short(self, budget: int, num_decoding: int, least: int) -> int:
        """``budget``, or what takes ``SHORT_SECONDS``, if that has at least so many prompt tokens."""
        # A step of few prompt tokens takes about as long as a decode step, so it says nothing of long ones.
        seconds_each = max(self._seconds_of_prompt_token, min(self._costs.values(), default=0.0))
        if not seconds_each:
            return budget
        room = SHORT_SECONDS - self._seconds_of_decodes(max(1, num_decoding))
        return min(budget, num_decoding + max(int(room / seconds_each), least))

    def _full_rows(self, num_prompts: int, position: int) -> int:
        """The fewest rows with which a prompt token costs about as little as with any number, as far as is known: of a
        mixture of experts, which reads nearly all weights for few rows as well, they are more; behind a long context,
        where attention is most of the cost and takes as long in any steps, fewer. Several prompts at once are a load
        for which the time of all counts, and not that of a short one which may come."""
        if not self._costs:
            return FULL_ROWS
        least = min(self._costs.values())
        most = least + (FULL_COST - 1) * (least + self.model.pair_seconds * position)
        rows, assumed = (FULL_ROWS // 2, COST_OF_HALF * least) if num_prompts < 2 else (FULL_ROWS, 0.0)
        while rows < self.most and self._costs.get(rows.bit_length(), assumed) > most:
            rows, assumed = 2 * rows, 0.0
        return rows

    def _seconds_of_decodes(self, num_decoding: int) -> float:
        """Predicted seconds of a step in which so many sequences decode and nothing else is computed."""
        if not self.model.is_ready:
            return 0.0
        decodes = StepWork.of_decodes(num_decoding, self._decode_context)
        return self.model.seconds(decodes._replace(num_proposed=max(0, self._num_proposed)))

    def _cheapest(self, curve: Array, num_running: int, num_decoding: int, num_pending: int) -> int:
        """The budget with the least cost of a prompt token, by the predicted seconds at each knot; or one to try."""
        knots = self.model.knots
        is_enough = (knots >= num_running + LEAST_CHUNK) & (knots <= self.most_mixed)
        budgets, seconds = knots[is_enough], curve[is_enough]
        if len(budgets) < 2:
            return self.most_mixed
        alone = self._seconds_of_decodes(num_decoding)
        delay = WAITING_WEIGHT * alone * num_pending / (num_decoding + num_pending)
        costs = (np.maximum(seconds - alone, 0) + delay) / (budgets - num_decoding)
        is_even = seconds <= EVEN_STEP * alone
        if is_even.any() and self._are_new(budgets[is_even]):
            budgets, costs = budgets[is_even], costs[is_even]
        best = int(np.argmax(costs <= (1 + TOLERANCE) * costs.min()))
        return int(budgets[self._tried(best, budgets)])

    def _are_new(self, budgets: Array) -> bool:
        """Whether any of them is still to be tried."""
        return any(self._num_trials[int(budget)] < NUM_FIRST_TRIALS for budget in budgets)

    def _tried(self, best: int, budgets: Array) -> int:
        """``best``, or now and then the number of another budget, so that its cost is known."""
        self._num_choices += 1
        if self._num_choices % STEPS_BETWEEN_FIRST_TRIALS == 0:
            rarest = min(range(len(budgets)), key=lambda number: self._num_trials[int(budgets[number])])
            if self._num_trials[int(budgets[rarest])] < NUM_FIRST_TRIALS:
                self._num_trials[int(budgets[rarest])] += 1
                return rarest
        number, phase = divmod(self._num_choices, STEPS_BETWEEN_TRIALS)
        if phase == 0:
            return min(max(best + (1 if number % 2 else -1), 0), len(budgets) - 1)
        return best

    def draft_room(self, budget: int, num_running: int) -> DraftRoom:
        """Room for drafts in a step with prompts: in addition to its ``budget``, with at least half of the largest
        step's rows left to prompts."""
        most = (self.most_mixed - num_running) // 2 if self.model.is_ready else 0
        position = self._decode_context / max(1, self._num_decoding)

        def draft_seconds(count: int) -> float:
            return self.model.draft_seconds(min(budget, self.most_mixed - count), count, position)

        return DraftRoom(most, draft_seconds)

    def plain_seconds(self, plan: Plan) -> float | None:
        """Predicted seconds of a step with prompts, without drafts and without the executor's drafter; ``None`` for a
        step of decodes alone, whose seconds are known better."""
        if all(len(item.tokens) == 1 for item in plan):
            return None
        return self.model.seconds(work_of(plan, has_drafts=False))

    def prompt_seconds(self, plan: Plan) -> float | None:
        """Predicted seconds of a step of prompts alone; ``None`` for others."""
        return self.model.seconds(work_of(plan)) if all(len(item.tokens) > 1 for item in plan) else None

    def seconds_alone(self, start: int, num_tokens: int) -> float:
        """Predicted seconds of so many tokens of a prompt behind ``start`` others, while nothing else is computed;
        infinite before any prompt of ``FULL_ROWS // 2`` tokens was."""
        if not self._costs:
            return inf
        num_pairs = num_tokens * start + num_tokens * num_tokens // 2
        return max(self._costs.values()) * num_tokens + self.model.pair_seconds * num_pairs

    def admits(self, num_running: int) -> bool:
        """Whether one more sequence may run in addition to ``num_running`` others."""
        limit = MARGIN * min([self.max_itl, *self.waiting.targets()])
        if num_running == 0 or limit == inf:
            return True
        return self.model.seconds(StepWork.of_decodes(num_running + 1, self._context)) <= limit

    def learn(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """Record that a step over ``plan``, of ``num_tokens`` in total, took ``seconds``."""
        self._anyone_waits_for_tokens = any(item.samples for item in plan)
        self._num_steps += 1
        if num_tokens == len(plan) and self.model.is_ready and self._num_steps % DECODES_BETWEEN_SAMPLES:
            return
        work = work_of(plan)
        self._context = work.context - work.tokens
        self._num_proposed = work.num_proposed if work.drafted_rows else NO_DRAFTER
        decodes = [item.start for item in plan if len(item.tokens) == 1]
        self._decode_context, self._num_decoding = sum(decodes), len(decodes)
        self._most_rows = max(self._most_rows, work.tokens)
        if work.has_prompt:
            self._learn_prompts(work, seconds)
            self._position = max([item.start + len(item.tokens) for item in plan if len(item.tokens) > 1])
        self.model.learn(work, seconds)

    def _learn_prompts(self, work: StepWork, seconds: float) -> None:
        """Learn what a prompt token costs, from a step with prompts. Drafts are none."""
        num_tokens = work.tokens - work.num_verified - self._num_decoding
        if num_tokens >= LEAST_TELLING:
            seconds_of_prompts = seconds - self._seconds_of_decodes(max(1, self._num_decoding))
            self._seconds_of_prompt_token = max(0.0, seconds_of_prompts) / num_tokens
        if (
            num_tokens >= FULL_ROWS // 2
            and not self._num_decoding
            and (self.model.is_ready or work.context == work.tokens)
        ):
            of_rows = max(seconds - self.model.context_seconds(work), seconds / LEAST_SHARE)
            size, cost = num_tokens.bit_length(), of_rows / num_tokens
            self._costs[size] = min(cost, GROWTH_OF_COSTS * self._costs.get(size, cost))
