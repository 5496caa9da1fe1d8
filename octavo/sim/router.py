"""Routing of requests to replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from octavo.errors import ConfigError
from octavo.sim.jobs import Awaits, Job

if TYPE_CHECKING:
    from octavo.sim.replica import Replica

SLACK = 4
"""``PrefixAware`` considers replicas with at most 1.25 times the least loaded one's requests, plus this many."""


T = TypeVar("T")


class Router(Protocol):
    """Chooses one of the replicas for a job."""

    def choose(self, job: Job, replicas: Sequence[Replica]) -> Replica: ...


class BlindRouter(Protocol):
    """A router that ignores the state of the replicas, so that any objects may represent them."""

    separates: ClassVar[tuple[Awaits, ...]]
    """Kinds of workloads for which a replica's jobs and their times do not depend on the other replicas."""

    def choose(self, job: Job, replicas: Sequence[T]) -> T: ...


class RoundRobin:
    """Each in turn."""

    separates: ClassVar[tuple[Awaits, ...]] = ("none",)

    def __init__(self) -> None:
        self.turn = -1

    def choose(self, job: Job, replicas: Sequence[T]) -> T:
        self.turn = (self.turn + 1) % len(replicas)
        return replicas[self.turn]


class BySession(RoundRobin):
    """All turns of a session to one replica; sessions, and jobs without a session, in turn."""

    separates: ClassVar[tuple[Awaits, ...]] = ("none", "session")

    def choose(self, job: Job, replicas: Sequence[T]) -> T:
        return replicas[job.session % len(replicas)] if job.session else super().choose(job, replicas)


class LeastLoaded:
    """The replica with the fewest unfinished requests."""

    def choose(self, job: Job, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=_load)


class PrefixAware:
    """Of the replicas within ``SLACK`` of the least loaded one, the one with most of the prompt cached."""

    def choose(self, job: Job, replicas: Sequence[Replica]) -> Replica:
        limit = 1.25 * min(map(_load, replicas)) + SLACK
        allowed = [replica for replica in replicas if len(replica.live) <= limit]
        depths = self._depths(job.tokens(), allowed)
        return min(zip(depths, allowed, strict=True), key=lambda pair: (-pair[0], len(pair[1].live)))[1]

    def _depths(self, tokens: list[int], replicas: Sequence[Replica]) -> list[int]:
        """Number of the prompt's blocks cached on each replica; each block's key is computed once for all."""
        tree = replicas[0].cache.groups[0].tree
        nodes = [replica.cache.groups[0].tree.root for replica in replicas]
        depths = [0] * len(replicas)
        active = range(len(replicas))
        for index in range((len(tokens) - 1) // tree.block_size):
            edge = tree.edge(tokens, index, "")  # type: ignore[arg-type]
            still = []
            for number in active:
                child = nodes[number].children.get(edge)
                if child is not None:
                    nodes[number] = child
                    depths[number] = index + 1
                    still.append(number)
            if not still:
                break
            active = still  # type: ignore[assignment]
        return depths


def _load(replica: Replica) -> int:
    return len(replica.live)


BLIND: dict[str, type[BlindRouter]] = {"round-robin": RoundRobin, "session": BySession}
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
