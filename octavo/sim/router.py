"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from octavo.errors import ConfigError
from octavo.sim.jobs import Awaits, Job

if TYPE_CHECKING:
    from octavo.sim.replica import Replica

SLACK = 4
"""Requests that a replica may have above the least loaded one, and a quarter of that one's, and still be chosen."""


T = TypeVar("T")


class Router(Protocol):
    """Chooses one of the replicas for a job."""

    def choose(self, job: Job, replicas: Sequence[Replica]) -> Replica: ...


class BlindRouter(Protocol):
    """Does not look at the replicas, so that anything may stand for them."""

    separates: ClassVar[tuple[Awaits, ...]]
    """Workloads of which each replica gets the same jobs at the same times, whatever the others do."""

    def choose(self, job: Job, replicas: Sequence[T]) -> T: ...


class RoundRobin:
    """Each in turn."""

    separates: ClassVar[tuple[Awaits, ...]] = ("nobody",)

    def __init__(self) -> None:
        self.turn = -1

    def choose(self, job: Job, replicas: Sequence[T]) -> T:
        self.turn = (self.turn + 1) % len(replicas)
        return replicas[self.turn]


class BySession(RoundRobin):
    """All turns of a session the same, and sessions in turn; what has no session, in turn too."""

    separates: ClassVar[tuple[Awaits, ...]] = ("nobody", "session")

    def choose(self, job: Job, replicas: Sequence[T]) -> T:
        return replicas[job.session % len(replicas)] if job.session else super().choose(job, replicas)


class LeastLoaded:
    """The one with fewest requests under way."""

    def choose(self, job: Job, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=_load)


class PrefixAware:
    """The one with most of the prompt cached, of those that are not loaded much more than the least."""

    def choose(self, job: Job, replicas: Sequence[Replica]) -> Replica:
        limit = 1.25 * min(map(_load, replicas)) + SLACK
        allowed = [replica for replica in replicas if len(replica.live) <= limit]
        depths = self._depths(job.tokens(), allowed)
        return min(zip(depths, allowed, strict=True), key=lambda pair: (-pair[0], len(pair[1].live)))[1]

    def _depths(self, tokens: list[int], replicas: Sequence[Replica]) -> list[int]:
        """How many blocks of the prompt each replica has; what stands for a block's tokens is made once for all."""
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
