"""Routers: which replica a request goes to.

A router sees replicas through ``Candidate`` and requests through ``Query``, so that engine processes, replicas of a Ray
deployment and simulated engines are chosen by the same code.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from octavo.errors import ConfigError

SLACK = 4
"""``PrefixAware`` considers replicas with at most 1.25 times the least loaded one's requests, plus this many."""


class Query(Protocol):
    """A request as a router sees it."""

    @property
    def session(self) -> int:
        """The number of the conversation that it is a turn of; 0 for none."""
        ...

    @property
    def tenant(self) -> str: ...


Q = TypeVar("Q", contravariant=True)


class Candidate(Protocol[Q]):
    """A replica as a router sees it."""

    @property
    def num_live(self) -> int:
        """Its unfinished requests, running and waiting."""
        ...

    def num_live_of(self, tenant: str) -> int:
        """Its unfinished requests of one tenant."""
        ...

    def num_cached_blocks(self, query: Q) -> int:
        """How many blocks from the start of the request's prompt it has cached."""
        ...


R = TypeVar("R", bound=Candidate[Any])
T = TypeVar("T")


class Router(Protocol):
    """Chooses one of the replicas, at least one, for a request."""

    def choose(self, query: Query, replicas: Sequence[R]) -> R: ...


class BlindRouter(Protocol):
    """A router that ignores the state of the replicas, so that any objects may represent them."""

    separates: ClassVar[tuple[str, ...]]
    """What the requests of a workload may wait for (``octavo_fleet.sim.jobs.Awaits``) so that a replica's requests and
    their times do not depend on the other replicas."""

    def choose(self, query: Query, replicas: Sequence[T]) -> T: ...


class RoundRobinRouter:
    """Each in turn."""

    separates: ClassVar[tuple[str, ...]] = ("none",)

    def __init__(self) -> None:
        self.turn = -1

    def choose(self, query: Query, replicas: Sequence[T]) -> T:
        self.turn = (self.turn + 1) % len(replicas)
        return replicas[self.turn]


class AtRandom:
    """Any of them."""

    separates: ClassVar[tuple[str, ...]] = ("none",)

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def choose(self, query: Query, replicas: Sequence[T]) -> T:
        return self.rng.choice(replicas)


class BySession(RoundRobinRouter):
    """All turns of a session to one replica; sessions, and requests without a session, in turn."""

    separates: ClassVar[tuple[str, ...]] = ("none", "session")

    def choose(self, query: Query, replicas: Sequence[T]) -> T:
        return replicas[query.session % len(replicas)] if query.session else super().choose(query, replicas)


class LeastLoaded:
    """The replica with the fewest unfinished requests."""

    def choose(self, query: Query, replicas: Sequence[R]) -> R:
        return min(replicas, key=lambda replica: replica.num_live)


class PrefixAware:
    """Of the replicas within ``SLACK`` of the least loaded one, the one with most of the prompt cached.

    Among equals, it is the one with the fewest requests, then the one with the fewest of the same tenant: each tenant
    is spread over the replicas, so that shares that are fair on each replica are fair over the fleet.
    """

    def choose(self, query: Query, replicas: Sequence[R]) -> R:
        limit = 1.25 * min(replica.num_live for replica in replicas) + SLACK
        allowed = [replica for replica in replicas if replica.num_live <= limit]

        def cost(replica: R) -> tuple[int, int, int]:
            return -replica.num_cached_blocks(query), replica.num_live, replica.num_live_of(query.tenant)

        return min(allowed, key=cost)


BLIND: dict[str, type[BlindRouter]] = {"round-robin": RoundRobinRouter, "random": AtRandom, "session": BySession}
ROUTERS: dict[str, type[Router]] = {
    **BLIND,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def make_router(name: str) -> Router:
    """The router of that name; raise ``ConfigError`` when there is none."""
    if name not in ROUTERS:
        raise ConfigError(f"router: {name!r} is not one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
