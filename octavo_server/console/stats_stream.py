"""GET /stats/live: what the engine does, twice a second, as server-sent events.

A snapshot is taken once for all who watch, and none while nobody does. It has sizes and numbers of requests, no text.
With many viewers, or a cache whose view takes long, snapshots become rarer, so that their cost is bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.errors import InvalidParameter
from octavo.telemetry.cache_view import CacheView
from octavo.telemetry.counts import Histogram
from octavo_server.engines.engine_client import EngineClient
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.response import HEADERS, encode_line, json_response
from octavo_server.services import asked_services_of

INTERVAL = 0.5
"""Least seconds between two snapshots."""
FIRST_SECONDS = 0.05
"""How long the first viewer waits for a view of the cache as it is now."""
MAX_EVENTS_PER_SECOND = 100
"""Of all viewers together."""
MAX_VIEW_SHARE = 0.01
"""Share of an engine's time that views of its cache may take."""
MAX_SHOWN = 256
"""Most requests in a snapshot: the oldest."""
TOY = "toy"
"""The architecture of the engine that may go step by step: nobody waits for its answers."""
MAX_PACE = 1000


class LiveView:
    """Snapshots of one engine for any number of viewers."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._num_viewers = 0
        self._is_held = False
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes | None]

    async def watch(self) -> AsyncIterator[bytes]:
        """Snapshots as events, until the engine is not ready."""
        self._num_viewers += 1
        if self._task is None or self._task.done():
            self._next = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run())
        try:
            while (event := await asyncio.shield(self._next)) is not None:
                yield event
        finally:
            self._num_viewers -= 1

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._engine.cache_views()
            await asyncio.sleep(FIRST_SECONDS)
            while self._num_viewers and self._engine.is_ready:
                views = self._engine.cache_views()
                shown = {**snapshot(self._engine, views), "is_held": self._is_held}
                event = b"data: " + encode_line(shown) + b"\n\n"
                taken, self._next = self._next, loop.create_future()
                taken.set_result(event)
                cost = max((view.seconds for view in views), default=0.0)
                await asyncio.sleep(max(INTERVAL, self._num_viewers / MAX_EVENTS_PER_SECOND, cost / MAX_VIEW_SHARE))
        finally:
            if self._is_held and self._engine.is_ready:
                self.set_pace(None)  # nobody is left who could let it go on
            # Also of a viewer that is still sending an earlier event, and asks for this one later.
            self._next.set_result(None)

    @property
    def is_watched(self) -> bool:
        return self._num_viewers > 0

    def set_pace(self, steps: int | None) -> None:
        """Let the engine compute so many steps and then hold, as long as anybody watches; ``None``: go on."""
        self._is_held = steps is not None
        self._engine.set_pace(steps)


def snapshot(engine: EngineClient, views: Sequence[CacheView] = ()) -> dict[str, Any]:
    """Gauges, counters since the start, the oldest live requests, and ``views`` of the engines' caches."""
    stats, info, counts = engine.stats, engine.info, engine.metrics.engines
    return {
        "time": round(time.monotonic(), 3),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "live": engine.num_live,
        "max_running": info.max_num_seqs,
        "blocks": {
            "size": info.block_size,
            "total": stats.num_blocks,
            "used": stats.num_used_blocks,
            "cached": stats.num_cached_blocks,
        },
        "prompt_tokens": stats.num_prompt_tokens,
        "output_tokens": stats.num_output_tokens,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "preemptions": stats.num_preemptions,
        "steps": stats.num_steps,
        "step_tokens": stats.step_tokens,
        "step_seconds": round(stats.step_seconds, 6),
        "time_to_first_token": _sums(part.time_to_first_token for part in counts),
        "inter_token_latency": _sums(part.inter_token_latency for part in counts),
        "restarts": engine.num_restarts,
        "requests": [each._asdict() for each in itertools.islice(engine.progress(), MAX_SHOWN)],
        "caches": views,
        "last_steps": engine.steps.take(time.monotonic()),
        "max_step_tokens": info.max_num_batched_tokens,
        "can_hold": info.architecture == TOY,
    }


def _sums(histograms: Any) -> dict[str, float]:
    """Number and sum of what was observed, from which clients tell the mean of any interval."""
    found: list[Histogram] = list(histograms)
    return {"count": sum(each.count for each in found), "sum": round(sum(each.total for each in found), 6)}


async def pace(request: Request) -> Response:
    """Hold the engine of backend toy, let it compute some steps, or go on."""
    services, steps = asked_services_of(request), request.query_params.get("steps")
    if services.engine.info.architecture != TOY:
        raise UnsupportedParameter("steps", "Only an engine of --backend toy goes step by step.")
    if steps is not None and not (steps.isascii() and steps.isdigit() and int(steps) <= MAX_PACE):
        raise InvalidParameter("steps", f"'steps' must be from 0 to {MAX_PACE}, or be left out to go on.")
    view: LiveView = request.app.state.live_views[services.model_name]
    if steps is not None and not view.is_watched:
        raise InvalidParameter("steps", "The engine holds only while somebody reads /stats/live, as the console does.")
    view.set_pace(None if steps is None else int(steps))
    return json_response({"is_held": steps is not None}, {})


async def watch(request: Request) -> Response:
    view: LiveView = request.app.state.live_views[asked_services_of(request).model_name]
    return StreamingResponse(view.watch(), headers=HEADERS)


ENDPOINTS = [
    Endpoint("GET", "/stats/live", watch, "What the engine does, twice a second"),
    Endpoint("POST", "/stats/pace", pace, "Let the engine of `--backend toy` go step by step, or on"),
]
