"""The real engine on a clock that only steps move: for questions about order, share and waiting."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.types import Masks, Plan, Request, Sampled
from octavo_bench.overhead import InstantStep


@dataclass(frozen=True)
class StepCost:
    """Seconds that a step takes: a fixed part, and some for each token and each sequence."""

    base: float = 0.005
    per_token: float = 0.00002
    per_sequence: float = 0.00001

    def seconds(self, plan: Plan) -> float:
        num_tokens = sum(len(item.tokens) + len(item.drafts) for item in plan)
        return self.base + self.per_token * num_tokens + self.per_sequence * len(plan)


@dataclass
class VirtualProgress:
    """What a client saw of one request, in virtual seconds."""

    request: Request
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.request.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


class VirtualRunner:
    """A device that takes ``cost`` for a step, on its own clock."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.now = 1.0
        self.num_computed = 0

    def clock(self) -> float:
        return self.now

    def submit(self, plan: Plan) -> VirtualStep:
        return VirtualStep(plan, self)


class VirtualStep(InstantStep):
    """A step that moves the clock when it is waited for."""

    def __init__(self, plan: Plan, runner: VirtualRunner) -> None:
        super().__init__(plan)
        self.runner = runner

    def sample(self, masks: Masks) -> list[Sampled]:
        self.runner.now += self.runner.cost.seconds(self.plan)
        self.runner.num_computed += sum(len(item.tokens) for item in self.plan)
        return super().sample(masks)


class VirtualEngine:
    """An engine, its device and its clock, served with requests that come at given times."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        cost: StepCost = StepCost(),
        num_blocks: int = 4096,
        block_size: int = 16,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        depth: int = 1,
    ) -> None:
        self.runner = VirtualRunner(cost)
        scheduler = Scheduler(
            KVCache(num_blocks, block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            settings=settings,
            clock=self.runner.clock,
        )
        self.engine = Engine(scheduler, self.runner, depth=depth)
        self.progress: dict[int, VirtualProgress] = {}

    def serve(self, requests: Sequence[Request], until: float = float("inf")) -> dict[int, VirtualProgress]:
        """Serve ``requests``, each from its ``arrival`` on, to their end or to the time ``until``."""
        due = [(request.arrival, request.id, request) for request in requests]
        heapq.heapify(due)
        while (due or self.engine.has_work) and self.runner.now < until:
            if not self.engine.has_work:
                self.runner.now = max(self.runner.now, due[0][0])
            while due and due[0][0] <= self.runner.now:
                request = heapq.heappop(due)[2]
                self.progress[request.id] = VirtualProgress(request)
                self.engine.add(request)
            for output in self.engine.step():
                self.progress[output.request_id].token_times += [self.runner.now] * len(output.tokens)
        return self.progress
