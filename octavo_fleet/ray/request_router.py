"""Ray Serve's request router, with the routers of ``octavo_fleet.routing``.

Engines report digests of their prefix caches through Serve's routing statistics. The router adds what it knows itself:
requests that it has sent and that have not ended, and their prompts, which will be cached before the next digest tells.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from octavo_fleet.ray.messages import decode_request
from octavo_fleet.routing.prefixes import PromptQuery, RemotePrefixes
from octavo_fleet.routing.routers import make_router

FORGET_SECONDS = 30.0
"""A request for which a replica was chosen counts for this long until the replica accepts it."""


class _View:
    """A replica as routers see it."""

    def __init__(self, patience: float) -> None:
        self.prefixes = RemotePrefixes(patience)
        self.block_size = 0
        self.own: dict[str, str] = {}
        """Tenants of the unfinished requests that this router sent there, by Ray's id of the request."""
        self.num_reported = 0
        self.replica: RunningReplica | None = None

    @property
    def num_live(self) -> int:
        """Those that this router sent, or, with several routers, what the replica last reported if that is more."""
        return max(len(self.own), self.num_reported)

    def num_live_of(self, tenant: str) -> int:
        return sum(each == tenant for each in self.own.values())

    def num_cached_blocks(self, query: PromptQuery) -> int:
        return self.prefixes.num_cached_blocks(query, self.block_size) if self.block_size else 0

    def update(self, replica: RunningReplica, is_only_router: bool) -> None:
        self.replica = replica
        stats = replica.routing_stats
        if stats:
            self.block_size = stats["block_size"]
            self.num_reported = 0 if is_only_router else stats["num_live"]
            self.prefixes.update(stats["digest"], time.monotonic())


class OctavoRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not always installed
    """Ranks the chosen replica first, and all others second, in case that it is full."""

    def initialize_state(self, router: str, patience: float, is_only_router: bool) -> None:
        """``router`` is a name of ``octavo_fleet.routing.routers.ROUTERS``; for ``patience`` see ``RemotePrefixes``."""
        self._choice = make_router(router)
        self._patience = patience
        self._is_only_router = is_only_router
        self._views: dict[ReplicaID, _View] = {}
        self._unaccepted: dict[str, tuple[float, _View]] = {}
        """When a replica was chosen for requests that it has not accepted yet, by Ray's id of the request."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        is_generation = pending_request is not None and pending_request.metadata.call_method == "generate"
        if not is_generation or not candidate_replicas:
            return [candidate_replicas]
        assert pending_request is not None
        self._update(candidate_replicas)
        views = [self._views[replica.replica_id] for replica in candidate_replicas]
        query = PromptQuery.of(decode_request(pending_request.args[0]))
        chosen = self._choice.choose(query, views)
        self._note_chosen(chosen, query, pending_request.metadata.internal_request_id)
        assert chosen.replica is not None
        return [[chosen.replica], [replica for replica in candidate_replicas if replica is not chosen.replica]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name = pending_request.metadata.internal_request_id
        entry = self._unaccepted.pop(name, None)
        view = self._views.get(replica_id)
        if entry is not None and view is not None and entry[1] is not view:  # the chosen one was full
            view.own[name] = entry[1].own.pop(name, "")

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._unaccepted.pop(internal_request_id, None)
        view = self._views.get(replica_id)
        if view is not None:
            view.own.pop(internal_request_id, None)

    def _update(self, replicas: list[RunningReplica]) -> None:
        for gone in self._views.keys() - self.curr_replicas.keys():
            del self._views[gone]
        for replica in replicas:
            view = self._views.setdefault(replica.replica_id, _View(self._patience))
            view.update(replica, self._is_only_router)

    def _note_chosen(self, chosen: _View, query: PromptQuery, name: str) -> None:
        now = time.monotonic()
        earlier = self._unaccepted.pop(name, None)
        if earlier is not None:
            earlier[1].own.pop(name, None)
        for old in [each for each, (since, _) in self._unaccepted.items() if now - since > FORGET_SECONDS]:
            self._unaccepted.pop(old)[1].own.pop(old, None)
        self._unaccepted[name] = (now, chosen)
        chosen.own[name] = query.tenant
        if chosen.block_size:
            chosen.prefixes.note_sent(query, chosen.block_size, now)
