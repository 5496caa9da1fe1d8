"""GET /stats/live: what the engine does, twice a second, as server-sent events.

A snapshot is taken once for all who watch, and none while nobody does. It has sizes and numbers of requests, no text.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.server.engine_client import EngineClient
from octavo.server.openai.rendering import encode_line
from octavo.server.openai.schema import Endpoint
from octavo.server.sse import HEADERS
from octavo.telemetry.histogram import Histogram

INTERVAL = 0.5
"""Seconds between two snapshots."""
MAX_SHOWN = 256
"""Most requests in a snapshot: the oldest."""


class LiveView:
    """Snapshots of one engine for any number of viewers."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._num_viewers = 0
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
        while self._num_viewers:
            event = None
            if self._engine.is_ready:
                event = b"data: " + encode_line(snapshot(self._engine)) + b"\n\n"
            taken, self._next = self._next, loop.create_future()
            taken.set_result(event)
            if event is None:
                break
            await asyncio.sleep(INTERVAL)


def snapshot(engine: EngineClient) -> dict[str, Any]:
    """Gauges, counters since the start, and the oldest live requests."""
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
    }


def _sums(histograms: Any) -> dict[str, float]:
    """Number and sum of what was observed, from which clients tell the mean of any interval."""
    found: list[Histogram] = list(histograms)
    return {"count": sum(each.count for each in found), "sum": round(sum(each.total for each in found), 6)}


async def watch(request: Request) -> Response:
    view: LiveView = request.app.state.live_view
    return StreamingResponse(view.watch(), headers=HEADERS)


ENDPOINTS = [Endpoint("GET", "/stats/live", watch, "What the engine does, twice a second")]
