"""The names of the package ``llm_engine`` (github.com/ad-github1/LLM-INFERENCE-ENGINE) over Octavo's engine.

A program for that package runs with ``from octavo_fleet import llm_engine`` in place of ``import llm_engine``: its
tokens are the same. Who is preempted when blocks run out, and in which order blocks are taken, is Octavo's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.types import Request as EngineRequest
from octavo_fleet.backends.toy_models import FakeRunner, NextByFormula

__all__ = [
    *("EngineConfig", "InferenceEngine", "KVCacheError", "MetricsSnapshot", "Request", "RequestStatus", "StepResult"),
    "TokenEvent",
]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine."""

    max_batch_size: int = 8
    max_prefill_tokens_per_step: int = 32
    cache_block_size: int = 16
    cache_num_blocks: int = 256
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_prefill_tokens_per_step", "cache_block_size", "cache_num_blocks"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")


class KVCacheError(RuntimeError):
    """A request that could never have enough blocks."""


class RequestStatus(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(slots=True)
class Request:
    """A request and what came of it."""

    request_id: str
    prompt_tokens: list[int]
    max_new_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    prompt_cursor: int = 0
    generated_tokens: list[int] = field(default_factory=list)
    submitted_at_ns: int = 0
    started_at_ns: int = 0
    finished_at_ns: int = 0
    error: str | None = None

    @property
    def is_terminal(self) -> bool:
        return self.status in (RequestStatus.FINISHED, RequestStatus.FAILED)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token that came."""

    request_id: str
    token_id: int
    step: int
    source: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computed of one request."""

    request_id: str
    token_start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    step: int
    prefill: tuple[Work, ...] = ()
    decode: tuple[Work, ...] = ()
    token_events: tuple[TokenEvent, ...] = ()
    finished_request_ids: tuple[str, ...] = ()
    cache_used_blocks: int = 0
    cache_free_blocks: int = 0
    cache_memory_utilization: float = 0.0
    cache_internal_fragmentation_ratio: float = 0.0
    cache_external_fragmentation_ratio: float = 0.0
    step_duration_ms: float = 0.0

    @property
    def emitted_tokens(self) -> int:
        return len(self.token_events)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Totals since the start."""

    submitted_requests: int
    completed_requests: int
    failed_requests: int
    total_generated_tokens: int
    total_prefill_tokens: int
    total_decode_tokens: int
    step_count: int
    elapsed_ms: float
    request_throughput_rps: float
    token_throughput_tps: float
    p50_latency_ms: float
    p95_latency_ms: float
    p99_latency_ms: float
    p50_queue_wait_ms: float
    p95_queue_wait_ms: float
    p99_queue_wait_ms: float
    avg_batch_size: float
    max_batch_size_seen: int
    avg_step_duration_ms: float
    p99_step_duration_ms: float
    avg_memory_utilization: float
    peak_memory_utilization: float
    avg_internal_fragmentation_ratio: float
    peak_internal_fragmentation_ratio: float
    avg_external_fragmentation_ratio: float
    peak_external_fragmentation_ratio: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks as of now."""

    total_blocks: int
    used_blocks: int
    free_blocks: int
    memory_utilization: float
    internal_fragmentation_ratio: float
    external_fragmentation_ratio: float


class PagedKVCache:
    """What of the KV cache can be asked."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def stats(self) -> CacheStats:
        cache, firsts = self._cache, [groups[0] for groups in self._cache.ranks]
        used = sum(group.num_used for group in firsts)
        return CacheStats(
            cache.num_blocks,
            used,
            cache.num_blocks - used,
            cache.num_filled / (cache.num_blocks * cache.block_size),
            cache.num_empty_slots / max(1, used * cache.block_size),
            external_fragmentation(block for group in firsts for block in group.pool.free_blocks),
        )


def external_fragmentation(free_blocks: Iterable[int]) -> float:
    """Share of the free blocks outside of the longest run of neighbours. To a paged cache any block is as good."""
    free = sorted(free_blocks)
    runs = [len(list(run)) for _, run in itertools.groupby(enumerate(free), lambda pair: pair[1] - pair[0])]
    return 1 - max(runs) / len(free) if free else 0.0


class InferenceEngine:
    """Octavo's engine over the deterministic model of that package, under its names."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        blocks = KVCache(self.config.cache_num_blocks, self.config.cache_block_size)
        self.cache = PagedKVCache(blocks)
        scheduler = Scheduler(
            blocks,
            max_num_seqs=self.config.max_batch_size,
            max_num_batched_tokens=self.config.max_prefill_tokens_per_step + self.config.max_batch_size,
            settings=SchedulerSettings(scheduling_policy="fcfs"),
            clock=lambda: 0.0,  # no step time is measured, so that decisions are the same everywhere
        )
        self._engine = Engine(scheduler, FakeRunner(NextByFormula(self.config.eos_token_id)))
        self._requests: dict[str, Request] = {}
        self._names: list[str] = []
        """Ids of requests by the engine's number."""
        self._ids = itertools.count(1)
        self._steps: list[StepResult] = []
        self._started_at_ns = time.perf_counter_ns()

    @property
    def has_pending_work(self) -> bool:
        return self._engine.has_work

    @property
    def live_requests(self) -> tuple[Request, ...]:
        return tuple(request for request in self._requests.values() if not request.is_terminal)

    @property
    def completed_requests(self) -> tuple[Request, ...]:
        ended = [request for request in self._requests.values() if request.is_terminal]
        return tuple(sorted(ended, key=lambda request: request.finished_at_ns))

    def request(self, request_id: str) -> Request:
        return self._requests[request_id]

    def submit(
        self,
        prompt_tokens: Iterable[int],
        *,
        max_new_tokens: int,
        request_id: str | None = None,
        eos_token_id: int | None = None,
    ) -> str:
        """Add a request; returns its id. Raises ``ValueError``, or ``KVCacheError`` if it could never be served."""
        prompt = list(prompt_tokens)
        if not prompt:
            raise ValueError("prompt_tokens must not be empty")
        if max_new_tokens <= 0:
            raise ValueError("max_new_tokens must be positive")
        name = request_id or f"req-{next(self._ids)}"
        if name in self._requests:
            raise ValueError(f"request_id {name!r} already exists")
        end = self.config.eos_token_id if eos_token_id is None else eos_token_id
        params = SamplingParams(max_tokens=max_new_tokens, stop_token_ids=() if end is None else (end,))
        try:
            self._engine.add(EngineRequest(len(self._names), prompt, params, max_new_tokens))
        except RequestError as error:
            raise KVCacheError(str(error)) from None
        self._names.append(name)
        self._requests[name] = Request(name, prompt, max_new_tokens, submitted_at_ns=time.perf_counter_ns())
        return name

    def step(self) -> StepResult:
        """Run one step."""
        started, number = time.perf_counter_ns(), len(self._steps) + 1
        outputs = self._engine.step()
        now = time.perf_counter_ns()
        prefill: list[Work] = []
        decode: list[Work] = []
        for item in self._engine.last_plan:
            request = self._requests[self._names[item.seq.id]]
            request.started_at_ns = request.started_at_ns or started
            is_prompt = item.start < len(request.prompt_tokens)
            (prefill if is_prompt else decode).append(Work(request.request_id, item.start, len(item.tokens)))
            request.prompt_cursor = min(len(request.prompt_tokens), item.start + len(item.tokens))
            request.status = RequestStatus.PREFILL if is_prompt and not item.samples else RequestStatus.DECODE
        sources = {one.request_id: "prefill" for one in prefill}
        events: list[TokenEvent] = []
        for output in outputs:
            request = self._requests[self._names[output.request_id]]
            request.generated_tokens += output.tokens
            if output.finish_reason is not None:
                is_failed = output.finish_reason == "error"
                request.status = RequestStatus.FAILED if is_failed else RequestStatus.FINISHED
                request.finished_at_ns, request.error = now, output.error
            source, ended = sources.get(request.request_id, "decode"), output.finish_reason is not None
            events += [TokenEvent(request.request_id, token, number, source, ended) for token in output.tokens]
        finished = tuple(event.request_id for event in events if event.finished)
        cache = self.cache.stats()
        result = StepResult(
            number,
            tuple(prefill),
            tuple(decode),
            tuple(events),
            finished,
            cache.used_blocks,
            cache.free_blocks,
            cache.memory_utilization,
            cache.internal_fragmentation_ratio,
            cache.external_fragmentation_ratio,
            (now - started) / 1e6,
        )
        self._steps.append(result)
        return result

    def run_until_complete(self, max_steps: int = 10_000) -> list[StepResult]:
        """Raises ``TimeoutError`` if work is left after ``max_steps``."""
        results: list[StepResult] = []
        while self.has_pending_work:
            if len(results) == max_steps:
                raise TimeoutError(f"requests are unfinished after {max_steps} steps")
            results.append(self.step())
        return results

    def metrics_snapshot(self) -> MetricsSnapshot:
        ended, steps = self.completed_requests, self._steps
        seconds = max(1e-9, (time.perf_counter_ns() - self._started_at_ns) / 1e9)
        waits = _percentiles([(one.started_at_ns - one.submitted_at_ns) / 1e6 for one in ended])
        latencies = _percentiles([(one.finished_at_ns - one.submitted_at_ns) / 1e6 for one in ended])
        durations, batches = (
            [one.step_duration_ms for one in steps],
            [len(one.prefill) + len(one.decode) for one in steps],
        )
        generated = sum(one.emitted_tokens for one in steps)
        failed = sum(one.status is RequestStatus.FAILED for one in ended)
        shares = [
            [getattr(one, f"cache_{name}") for one in steps] or [0.0]
            for name in ("memory_utilization", "internal_fragmentation_ratio", "external_fragmentation_ratio")
        ]
        return MetricsSnapshot(
            len(self._requests),
            len(ended) - failed,
            failed,
            generated,
            sum(work.num_tokens for one in steps for work in one.prefill),
            sum(len(one.decode) for one in steps),
            len(steps),
            1e3 * seconds,
            len(ended) / seconds,
            generated / seconds,
            *latencies,
            *waits,
            statistics.fmean(batches or [0]),
            max(batches, default=0),
            statistics.fmean(durations or [0.0]),
            _percentiles(durations)[2],
            *(figure for values in shares for figure in (statistics.fmean(values), max(values))),
        )


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    """The 50th, 95th and 99th."""
    if len(values) < 2:
        return (values[0],) * 3 if values else (0.0, 0.0, 0.0)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[94], cuts[98]
