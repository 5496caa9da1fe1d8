"""Counters and histograms of the server; ``catalogue`` has the names and definitions of the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from octavo.types import REPETITION, EngineInfo, EngineStats, FinishReason

LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
CHOICES_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKENS_BUCKETS = (1.0, *(float(2**k) for k in range(3, 15)))
HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def decades(highest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``highest``."""
    bounds: list[float] = []
    power = 1
    while power <= highest:
        bounds += [float(step * power) for step in (1, 2, 5) if step * power <= highest]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts of values per bucket, cheap enough to update for every token; a bucket includes its upper bound."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative ``(upper bound, count)`` pairs in Prometheus' form; the last bound is ``+Inf``."""
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


FINISH_REASONS: tuple[str, ...] = (*get_args(FinishReason), REPETITION)
"""Reasons that requests are counted by: a text that repeats itself is apart from others that end with ``stop``."""
COMPLETED = ("stop", "length", REPETITION)
REJECTIONS = ("queue_full", "unavailable", "too_large", "invalid", "unauthorized", "other")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_HANDLERS = 64
"""Routes beyond this number share one label: label values must not grow with client input."""

MAX_COUNTED_TOKENS = 1_000_000


@dataclass(frozen=True)
class Condition:
    """Current state of the engine process."""

    num_live: int = 0
    is_ready: bool = False
    seconds_since_progress: float = 0.0
    running_adapters: frozenset[str] = frozenset()
    """LoRA adapters of requests that were scheduled."""
    waiting_adapters: frozenset[str] = frozenset()
    """LoRA adapters of requests that were not scheduled yet."""
    sleep_level: int = 0
    """0 while the engine is awake."""


@dataclass(slots=True)
class Timing:
    """Timestamps of one request, by ``time.monotonic()``; 0 means not yet."""

    arrival: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class Counts:
    """Counters and histograms of the server.

    ``condition`` and ``info`` are set by the owner of the engine process; ``stats``, the engine's own counters,
    is replaced after every step.
    """

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.max_running = 0
        self.info: EngineInfo | None = None
        self.condition: Callable[[], Condition] = Condition

        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.step_seconds = 0.0
        self.restarts = 0
        self.hangs = 0
        self.replays = 0
        self.poison_requests = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected = dict.fromkeys(REJECTIONS, 0)
        self.journal = dict.fromkeys(("resumed_request", "damage", "failed_write"), 0)
        self.http_requests: dict[tuple[str, str, str], int] = {}
        self.http_seconds: dict[str, Histogram] = {}
        self.request_n = Histogram(CHOICES_BUCKETS)

        tokens = decades(MAX_COUNTED_TOKENS)
        self.time_to_first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = Histogram(PER_TOKEN_BUCKETS)
        self.time_per_output_token = Histogram(PER_TOKEN_BUCKETS)
        self.end_to_end = Histogram(LATENCY_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.prefill_time = Histogram(LATENCY_BUCKETS)
        self.decode_time = Histogram(LATENCY_BUCKETS)
        self.inference_time = Histogram(LATENCY_BUCKETS)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_computed_tokens = Histogram(tokens)
        self.request_output_tokens = Histogram(tokens)
        self.request_max_tokens = Histogram(tokens)
        self.step_tokens = Histogram(STEP_TOKENS_BUCKETS)

    def observe_step(self, stats: EngineStats) -> None:
        """Record a reported step; ``stats`` is cumulative over all engine processes of this server."""
        if stats.num_steps != self.stats.num_steps:
            self.step_tokens.observe(stats.step_tokens)
            self.step_seconds += stats.step_seconds
            self.max_running = max(self.max_running, stats.num_running)
        self.stats = stats

    def observe_tokens(self, timing: Timing, count: int, now: float) -> None:
        """Record ``count`` > 0 output tokens of a request, after its first ones."""
        self.output_tokens += count
        self.inter_token_latency.observe(now - timing.last_token)
        timing.last_token = now

    def observe_first_tokens(
        self, timing: Timing, count: int, now: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """Record the first ``count`` > 0 output tokens of a request."""
        self.output_tokens += count
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        timing.first_token = timing.last_token = now
        self.request_computed_tokens.observe(prompt_tokens - cached_tokens)
        self.time_to_first_token.observe(now - timing.arrival)
        if timing.first_scheduled:
            self.queue_time.observe(timing.first_scheduled - timing.arrival)
            self.prefill_time.observe(now - timing.first_scheduled)

    @property
    def num_completed(self) -> int:
        """Requests that ended without an error and were not aborted."""
        return sum(self.finished[reason] for reason in COMPLETED)

    def observe_end(self, timing: Timing, reason: str, prompt_tokens: int, output_tokens: int, max_tokens: int) -> None:
        """Record the end of a request, for one of ``FINISH_REASONS``; latencies count only if it is completed."""
        self.finished[reason] += 1
        if reason not in COMPLETED:
            return
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_output_tokens.observe(output_tokens)
        self.request_max_tokens.observe(max_tokens)
        if not timing.first_token:
            return
        self.end_to_end.observe(timing.last_token - timing.arrival)
        self.decode_time.observe(timing.last_token - timing.first_token)
        if timing.first_scheduled:
            self.inference_time.observe(timing.last_token - timing.first_scheduled)
        if output_tokens > 1:
            self.time_per_output_token.observe((timing.last_token - timing.first_token) / (output_tokens - 1))

    def observe_choices(self, count: int) -> None:
        """Record a client's request for ``count`` continuations of a prompt."""
        self.request_n.observe(count)

    def observe_rejection(self, reason: str) -> None:
        """Record a request that admission refused, for one of ``REJECTIONS``."""
        self.rejected[reason if reason in self.rejected else "other"] += 1

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Record an answered HTTP request. ``handler`` is the route's pattern, never the requested path."""
        if handler not in self.http_seconds:
            if len(self.http_seconds) >= MAX_HANDLERS:
                handler = "other"
            self.http_seconds.setdefault(handler, Histogram(HTTP_BUCKETS))
        self.http_seconds[handler].observe(seconds)
        key = (handler, method if method in METHODS else "other", f"{status // 100}xx")
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
