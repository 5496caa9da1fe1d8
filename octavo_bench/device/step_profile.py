"""Where a step's time goes: wall time without a profiler, then the same steps with one, kernel by kernel."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.ops import dispatch
from octavo.types import EngineInfo, Request
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.dtypes import DTYPES
from octavo.weights.hub import resolve_model
from octavo_bench.device.timeline import OP, STEP, spans_of, summarise
from octavo_bench.offline import (
    about_engine,
    build_prepared,
    check_fit,
    checked_step,
    complete,
    decoding,
    random_requests,
    without_prefix_cache,
)
from octavo_bench.records.report import Say, spread
from octavo_fleet.sim.costs.roofline import Shape, decode_work, prefill_work, shape_of

WARM_UP_STEPS = 8


class StepProfiler:
    """One engine; each method measures one shape of step and writes its trace, for Perfetto or chrome://tracing."""

    def __init__(self, engine: Engine, info: EngineInfo, traces: Path) -> None:
        self._engine = engine
        self._info = info
        self._traces = traces
        self._next_id = 1
        traces.mkdir(parents=True, exist_ok=True)

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """``steps`` steps in which ``batch`` sequences of about ``context`` tokens get one token each."""
        chunks = -(-batch * context // self._info.max_num_batched_tokens)
        length = chunks + WARM_UP_STEPS + 2 * steps + 4
        check_fit(self._info, batch, context + length)
        requests = random_requests(batch, context, length, self._info.vocab_size, self._next_id, self._next_id)
        self._next_id += batch
        with decoding(self._engine, requests):
            for _ in range(WARM_UP_STEPS):
                checked_step(self._engine)
            times = [self._timed() for _ in range(steps)]
            found = self._profiled(f"decode_{batch}x{context}", steps, self._engine.step)
        return {"kind": "decode", "batch": batch, "context": context, **_with_wall(found, times)}

    def prefill(self, tokens: int, rounds: int) -> dict[str, Any]:
        """A prompt of ``tokens`` tokens, alone, to its first token; in several steps if one may not be that long."""
        check_fit(self._info, 1, tokens + 1)
        requests = [self._make(tokens) for _ in range(rounds + 2)]  # which takes milliseconds that are not the engine's
        times = [1e3 * complete(self._engine, [request]) for request in requests[:-1]][1:]
        found = self._profiled(f"prefill_{tokens}", 1, lambda: complete(self._engine, requests[-1:]))
        return {"kind": "prefill", "batch": 1, "context": tokens, **_with_wall(found, times)}

    def _make(self, tokens: int) -> Request:
        (request,) = random_requests(1, tokens, 1, self._info.vocab_size, self._next_id, self._next_id)
        self._next_id += 1
        return request

    def _timed(self) -> float:
        start = time.perf_counter()
        checked_step(self._engine)
        return (time.perf_counter() - start) * 1e3

    def _profiled(self, name: str, steps: int, step: Callable[[], object]) -> dict[str, Any]:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with dispatch.wrapped(_annotated), profile(activities=activities) as profiler:
            start = time.perf_counter()
            for number in range(steps):
                with record_function(f"{STEP}{number}"):
                    step()
            milliseconds = (time.perf_counter() - start) * 1e3 / steps
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        path = self._traces / f"{name}.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        return {"profiled_step_ms": round(milliseconds, 4), **summarise(spans_of(events), steps)}


def _annotated(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that shows in the trace under its operation's name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(OP + name):
            return kernel(*args, **kwargs)

    return run


def _with_wall(found: dict[str, Any], milliseconds: list[float]) -> dict[str, Any]:
    """Add wall times without a profiler, and the idle share that follows: the profiler slows the host, not kernels."""
    wall = spread(milliseconds)
    mean_us = sum(milliseconds) / len(milliseconds) * 1e3
    return {"step_ms": wall, "idle_percent": round(100 * max(0.0, 1 - found["busy_us"] / mean_us), 2), **found}


def measure(
    config: EngineConfig,
    batches: Sequence[int],
    context: int,
    steps: int,
    prefill: Sequence[int],
    say: Say,
    traces: Path | None = None,
) -> dict[str, Any]:
    """A row for each shape of step; traces go to a temporary folder by default."""
    config = without_prefix_cache(config)
    shape = shape_of(open_checkpoint(resolve_model(config.model), config.model.load_format).config)
    engine, info = build_prepared(config)
    traces = traces or Path(tempfile.mkdtemp(prefix="octavo_traces_"))
    profiler = StepProfiler(engine, info, traces)
    rows = [profiler.decode(batch, context, steps) for batch in batches]
    rows += [profiler.prefill(tokens, rounds=5) for tokens in prefill]
    say(f"traces are in {traces}")
    return {**about_engine(config, info), "rows": [{**row, **_least_work(shape, info, row)} for row in rows]}


def _least_work(shape: Shape, info: EngineInfo, row: dict[str, Any]) -> dict[str, int]:
    """Bytes and arithmetic that the step cannot do without, with dense weights of the engine's own type."""
    kv_per_token = info.memory["kv_cache"] / (info.num_kv_blocks * info.block_size)
    sizes = (DTYPES[info.dtype].itemsize, kv_per_token / shape.kv_values_per_token)
    if row["kind"] == "decode":
        return decode_work(shape, row["batch"], row["context"], *sizes)._asdict()
    return prefill_work(shape, row["context"], *sizes)._asdict()
