"""Fair share of tokens among tenants: the least served tenant goes first.

Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from octavo.engine.policies.fcfs import FirstCome
from octavo.engine.policies.policy import PolicyContext
from octavo.engine.waiting import WaitingQueue
from octavo.errors import ConfigError
from octavo.types import Order, Plan, Sampled, Sequence

OUTPUT_WEIGHT = 2.0
"""Cost of an output token in prompt tokens, as in the paper."""
LEAST_WEIGHT = 1e-6
MAX_REMEMBERED = 4096
"""Most tenants whose counters are kept while they have no requests."""


Rank = tuple[float, float, int, "Tenant"]
"""Heap entry of a tenant: counter, load, turn (unique), and the tenant."""


class Tenant:
    """Counter, waiting sequences and load of one tenant."""

    __slots__ = ("counter", "is_listed", "load", "name", "num_running", "turn", "waiting", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.counter = 0.0
        """Service received, in prompt tokens, divided by the weight."""
        self.waiting = WaitingQueue()
        self.num_running = 0
        self.load = 0.0
        """Running sequences divided by the weight."""
        self.turn = 0
        """Number of the push with which it began to wait, or of its last admission: the least is next among equals."""
        self.is_listed = False
        """Whether the heap has an entry for this tenant."""

    def run(self, change: int) -> None:
        """Add ``change`` to the number of running sequences."""
        self.num_running += change
        self.load = self.num_running / self.weight

    @property
    def rank(self) -> Rank:
        """Smaller is served first. New tenants have equal counters, and come by load, then in turn."""
        return self.counter, self.load, self.turn, self


class Fair(FirstCome):
    """Each tenant's counter grows with the tokens it gets; the waiting tenant with the smallest counter goes first.

    A tenant that returns after a pause starts from the counter of the tenant served last, so that idle time earns no
    credit. The batch is never left unfilled while sequences wait, so a tenant alone gets all of it.

    Counters decide which sequence is admitted, and which prompt is computed first. When the batch is full, the first
    waiting sequence preempts one of the tenant with the highest load, the youngest, provided that its own tenant's load
    does not become the higher one. When blocks run out, the tenant with the highest load is preempted, too. So no
    tenant waits for the completion of a burst that was admitted before.
    """

    name = "fair"
    preempts_for_waiting = True
    charges = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.weights = parse_weights(context.settings.tenant_weights or "")
        self.tenants: dict[str, Tenant] = {}
        self.served: dict[str, Tenant] = {}
        """Tenants with running sequences, by name."""
        self.floor = 0.0
        """Counter of the tenant chosen last: the smallest among those that waited."""
        self._by_rank: list[Rank] = []
        """A heap with an entry for each waiting tenant; the rank in it may be outdated."""
        self._tenant_of: dict[int, Tenant] = {}
        self._limit = MAX_REMEMBERED
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._tenant_of

    def push(self, seq: Sequence) -> None:
        tenant = seq.account = self._tenant_of[seq.id] = self._find(seq.request.tenant)
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self.floor)
            tenant.turn = next(self._turns)
        if not tenant.is_listed:
            tenant.is_listed = True
            heapq.heappush(self._by_rank, tenant.rank)
        tenant.waiting.push(seq)

    def _find(self, name: str) -> Tenant:
        tenant = self.tenants.get(name)
        if tenant is None:
            if len(self.tenants) >= self._limit:
                self._forget()
            tenant = self.tenants[name] = Tenant(name, self.weights.get(name, 1.0))
        return tenant

    def _forget(self) -> None:
        """Drop idle tenants, except the ``MAX_REMEMBERED / 2`` with the largest counters."""
        tenants = self.tenants.values()
        idle = sorted((t for t in tenants if not (t.waiting or t.num_running)), key=lambda tenant: tenant.counter)
        for tenant in idle[: len(idle) - MAX_REMEMBERED // 2]:
            del self.tenants[tenant.name]
        self._by_rank = [tenant.rank for tenant in self.tenants.values() if tenant.is_listed]
        heapq.heapify(self._by_rank)
        self._limit = max(MAX_REMEMBERED, 2 * len(self.tenants))

    def first(self) -> Sequence:
        while True:
            tenant = self._by_rank[0][-1]
            if self._by_rank[0] != tenant.rank:
                heapq.heapreplace(self._by_rank, tenant.rank)
            elif not tenant.waiting:
                tenant.is_listed = False
                heapq.heappop(self._by_rank)
            else:
                self.floor = max(self.floor, tenant.counter)
                return tenant.waiting.first()

    def shortest(self) -> Sequence:
        """Of the tenant that is next."""
        return self._tenant_of[self.first().id].waiting.shortest()

    def remove(self, request_id: int) -> Sequence:
        return self._tenant_of.pop(request_id).waiting.remove(request_id)

    def admit(self, seq: Sequence) -> None:
        self.remove(seq.id)
        tenant: Tenant = seq.account
        tenant.turn = next(self._turns)
        tenant.run(1)
        self.served[tenant.name] = tenant

    def leave(self, seq: Sequence) -> None:
        tenant: Tenant = seq.account
        tenant.run(-1)
        if not tenant.num_running:
            del self.served[tenant.name]

    def charge(self, plan: Plan, sampled: list[Sampled]) -> None:
        for item, result in zip(plan, sampled, strict=True):
            seq = item.seq
            cost = OUTPUT_WEIGHT * len(result.tokens)
            if item.start < seq.num_prompt_tokens and not seq.num_preemptions:  # recomputation is free
                cost += min(len(item.tokens), seq.num_prompt_tokens - item.start)
            seq.account.counter += cost / seq.account.weight

    def prefill_rank(self, seq: Sequence) -> Order:
        return (seq.account.counter, *seq.order)

    def preempt_for(self, seq: Sequence, running: dict[int, Sequence]) -> Sequence | None:
        own: Tenant = seq.account
        served = self.served.values()
        most = max([tenant.load for tenant in served])
        other = max([tenant for tenant in served if tenant.load == most], key=lambda tenant: tenant.counter)
        if other is own or (own.num_running + 1) / own.weight > (other.num_running - 1) / other.weight:
            return None
        return next((victim for victim in reversed(running.values()) if victim.account is other), None)

    def choose_victim(self, candidates: Iterator[Sequence]) -> Sequence | None:
        return max(candidates, key=lambda seq: (seq.account.load, seq.account.counter), default=None)

    def check(self) -> None:
        listed = [tenant for *_, tenant in self._by_rank]
        assert len(listed) == len(set(listed)), "a tenant is listed twice"
        for tenant in self.tenants.values():
            tenant.waiting.check()
            assert tenant.is_listed == (tenant in listed), "a tenant is listed and not in the heap, or the reverse"
            assert tenant.is_listed or not tenant.waiting, "a tenant waits and is not listed"
            assert tenant.num_running >= 0, "more left than ran"


def parse_weights(text: str) -> dict[str, float]:
    """``"a=2,b=0.5"`` as weights by tenant; raises ``ConfigError``."""
    weights = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT:
            raise ConfigError(f"tenant_weights: {part!r} is not NAME=WEIGHT with a weight from 0.000001 to 1000000")
        weights[name.strip()] = weight
    return weights
