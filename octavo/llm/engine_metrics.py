"""Totals and percentiles over the requests and steps of an ``Engine``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.llm.outputs import RequestMetrics
from octavo.types import EngineStats, FinishReason

WINDOW = 10_000
"""Percentiles, means of steps and peaks are over this many of the latest requests and steps."""


class Percentiles(NamedTuple):
    """Percentiles by linear interpolation; all 0 without values."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True)
class EngineMetrics:
    """What an ``Engine`` did so far. Times are in seconds; usage and fragmentation are fractions, 0 to 1."""

    num_submitted: int
    num_completed: int
    """Requests that ended by a stop or by their length."""
    num_failed: int
    num_aborted: int
    num_prompt_tokens: int
    """Prompt tokens computed, so without those found in the prefix cache."""
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    elapsed_time: float
    """From the first request until the end of the last step."""
    requests_per_second: float
    """Completed requests by ``elapsed_time``."""
    output_tokens_per_second: float
    queued_time: Percentiles
    first_token_latency: Percentiles
    e2e_latency: Percentiles
    step_time: Percentiles
    mean_step_time: float
    mean_batch_size: float
    """Sequences in a step."""
    max_batch_size: int
    mean_kv_cache_usage: float
    """Blocks held by requests after a step, of all blocks."""
    max_kv_cache_usage: float
    mean_kv_cache_fragmentation: float
    """Empty positions after a step, of all positions in blocks held by requests."""
    max_kv_cache_fragmentation: float


class RecordedStep(NamedTuple):
    """What is recorded of a step."""

    seconds: float
    batch_size: int
    kv_cache_usage: float
    kv_cache_fragmentation: float


class Recorder:
    """Records requests and steps, and makes ``EngineMetrics`` of them."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self._num_ended: dict[str, int] = {}
        self._requests: deque[RequestMetrics] = deque(maxlen=WINDOW)
        self._steps: deque[RecordedStep] = deque(maxlen=WINDOW)
        self._started_at = 0.0
        self._ended_at = 0.0

    def note_submitted(self) -> None:
        self._started_at = self._started_at or time.monotonic()
        self.num_submitted += 1

    def note_step(self, stats: EngineStats, block_size: int, batch_size: int) -> None:
        """Record a step that has just ended, after which the engine has ``stats``."""
        self._ended_at = time.monotonic()
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        fragmentation = stats.num_empty_slots / (stats.num_used_blocks * block_size) if stats.num_used_blocks else 0.0
        self._steps.append(RecordedStep(stats.step_seconds, batch_size, usage, fragmentation))

    def note_ended(self, reasons: Collection[FinishReason | None], metrics: RequestMetrics) -> None:
        """Record a request whose continuations ended for ``reasons``."""
        failed = "error" if "error" in reasons else "abort" if "abort" in reasons else "completed"
        self._num_ended[failed] = self._num_ended.get(failed, 0) + 1
        if failed == "completed":
            self._requests.append(metrics)

    def metrics(self, stats: EngineStats) -> EngineMetrics:
        """The metrics as of now; ``stats`` are the engine's."""
        elapsed = max(self._ended_at - self._started_at, 0.0)
        steps = np.array(self._steps or [RecordedStep(0.0, 0, 0.0, 0.0)], dtype=np.float64)
        means, peaks = steps.mean(axis=0).tolist(), steps.max(axis=0).tolist()
        num_completed = self._num_ended.get("completed", 0)
        return EngineMetrics(
            num_submitted=self.num_submitted,
            num_completed=num_completed,
            num_failed=self._num_ended.get("error", 0),
            num_aborted=self._num_ended.get("abort", 0),
            num_prompt_tokens=stats.num_prompt_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_steps=stats.num_steps,
            num_preemptions=stats.num_preemptions,
            elapsed_time=elapsed,
            requests_per_second=num_completed / elapsed if elapsed else 0.0,
            output_tokens_per_second=stats.num_output_tokens / elapsed if elapsed else 0.0,
            queued_time=_percentiles([request.queued_time for request in self._requests]),
            first_token_latency=_percentiles([request.first_token_latency for request in self._requests]),
            e2e_latency=_percentiles([request.e2e_latency for request in self._requests]),
            step_time=_percentiles([step.seconds for step in self._steps]),
            mean_step_time=means[0],
            mean_batch_size=means[1],
            max_batch_size=int(peaks[1]),
            mean_kv_cache_usage=means[2],
            max_kv_cache_usage=peaks[2],
            mean_kv_cache_fragmentation=means[3],
            max_kv_cache_fragmentation=peaks[3],
        )


def _percentiles(values: list[float]) -> Percentiles:
    return Percentiles(*np.percentile(values, (50, 95, 99)).tolist()) if values else Percentiles()
