"""Many requests, all at once or one after the other: throughput and latency of an engine in this process.

Beside each other at several values of a setting of the engine, or of a length, in turns: so it is seen what a setting
brings.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.config import EngineConfig, to_flat
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.types import EngineInfo, Request
from octavo_bench.offline import (
    Utilisation,
    about_engine,
    build_prepared,
    check_fit,
    checked_step,
    complete,
    random_requests,
)
from octavo_bench.records.report import Say, spreads

Figures = dict[str, float]
WARM_UP_TOKENS = 4


class ThroughputWork(NamedTuple):
    """Requests that come ``gap`` seconds apart. Their prompts begin with the same ``shared_len`` tokens."""

    num_prompts: int
    input_len: int
    output_len: int
    shared_len: int = 0
    gap: float = 0.0

    def requests(self, vocab_size: int, number: int) -> list[Request]:
        """Those of visit ``number``, which find nothing of others in the prefix cache."""
        own = random_requests(
            self.num_prompts, self.input_len - self.shared_len, self.output_len, vocab_size, 1, seed=number
        )
        (shared,) = random_requests(1, self.shared_len, 1, vocab_size, 1, seed=0)
        return [
            msgspec.structs.replace(
                one, prompt_tokens=[*shared.prompt_tokens, *one.prompt_tokens], cache_salt=str(number)
            )
            for one in own
        ]


LENGTHS = ("input_len", "output_len", "shared_len")
"""What can vary besides the settings of an engine."""
OF_PREFIXES = ("enable_prefix_caching", "enable_partial_reuse")
"""Settings that change nothing where prompts share nothing."""


@dataclass
class Visit:
    """What an engine made of some requests."""

    seconds: float = 0.0
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By the place of their request."""

    def figures(self, arrivals: dict[int, float]) -> Figures:
        """Output tokens per second, and milliseconds to the first token and between deliveries."""
        waits = [1e3 * (self.first[number] - arrival) for number, arrival in arrivals.items()]
        gaps = sorted(1e3 * gap for gap in self.gaps) or [math.nan]  # answers of one token have none
        return {
            "output_tok_s": sum(map(len, self.tokens.values())) / self.seconds,
            "ttft_ms": statistics.median(waits),
            "ttft_max_ms": max(waits),
            "itl_ms": statistics.median(gaps),
            "itl_p99_ms": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        }


def serve(
    engine: Engine, requests: Sequence[Request], gap: float, after_step: Callable[[], None] = lambda: None
) -> tuple[Visit, Figures]:
    """Serve requests that come one by one, ``gap`` seconds apart. Raises ``ConfigError`` when one fails."""
    visit = Visit()
    start = time.perf_counter()
    arrivals = {request.id: start + gap * number for number, request in enumerate(requests)}
    todo = list(reversed(requests))
    while todo or engine.has_work:
        now = time.perf_counter()
        while todo and arrivals[todo[-1].id] <= now:
            engine.add(todo.pop())
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[todo[-1].id] - now))
            continue
        outputs = checked_step(engine)
        now = time.perf_counter()
        after_step()
        for output in outputs:
            if output.request_id in visit.last:
                visit.gaps.append(now - visit.last[output.request_id])
            visit.first.setdefault(output.request_id, now)
            visit.last[output.request_id] = now
            visit.tokens.setdefault(output.request_id - requests[0].id, []).extend(output.tokens)
    visit.seconds = time.perf_counter() - start
    return visit, visit.figures(arrivals)


class ThroughputCase(NamedTuple):
    """An engine's settings, and what it has to do."""

    config: EngineConfig
    work: ThroughputWork


def cases_of(
    config: EngineConfig, work: ThroughputWork, vary: str | None, values: Sequence[str]
) -> dict[int | float | str, ThroughputCase]:
    """By value of ``vary``, a setting or a length; without one, all as it is given.

    Raises ``ConfigError`` for a setting that there is not, and for lengths that are none.
    """
    if not work.shared_len < work.input_len:
        raise ConfigError(f"shared_len: must be below input_len, {work.input_len}")
    if (vary is None) != (not values):
        raise ConfigError("vary: needs --values, and these need --vary")
    if vary is None:
        return {"": ThroughputCase(config, work)}
    flat, vary, tried = to_flat(config), vary.replace("-", "_"), [_value(text) for text in values]
    if vary in OF_PREFIXES and not work.shared_len:
        raise ConfigError(
            f"vary: {vary} changes nothing for prompts that share nothing; --shared-len says how much they do"
        )
    if vary in LENGTHS:
        lengths = [value for value in tried if isinstance(value, int) and value > 0]
        if len(lengths) != len(tried):
            raise ConfigError(f"values: {vary} must be integers of at least 1")
        return {
            length: ThroughputCase(config, ThroughputWork(**{**work._asdict(), vary: length})) for length in lengths
        }
    if vary not in flat:
        raise ConfigError(f"vary: {vary!r} is neither a setting of the engine nor one of {', '.join(LENGTHS)}")
    return {value: ThroughputCase(EngineConfig.from_flat({**flat, vary: value}), work) for value in tried}


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def measure(
    config: EngineConfig,
    work: ThroughputWork,
    rounds: int,
    say: Say,
    vary: str | None = None,
    values: Sequence[str] = (),
    peak: float | None = None,
) -> dict[str, Any]:
    """Throughput and latency, preemptions, blocks, and the most tokens of context held at once: with ``vary`` a row for
    each value, in turns. ``peak``: TFLOP/s of the device. Raises ``ConfigError``, see ``cases_of``."""
    cases = cases_of(config, work, vary, values)
    runs: dict[int | float | str, list[Figures]] = {value: [] for value in cases}
    engine = CaseEngine(peak)
    for _ in range(rounds):
        for value, case in cases.items():
            runs[value].append(engine.visit(case))
            named = "" if vary is None else f"{vary} {value}: "
            say(f"{named}{runs[value][-1]['output_tok_s']:.1f} output tokens/s")
    if vary is None:
        about = {**about_engine(config, engine.info), "peak_tflops": engine.used.peak}
        return {**about, **work._asdict(), **spreads(runs[""])}
    rows = [{vary.replace("-", "_"): value, **spreads(found)} for value, found in runs.items()]
    return {"model": Path(config.model.model).name, "device": engine.info.device, **work._asdict(), "rows": rows}


class CaseEngine:
    """The engine of the latest case; another one is built where the settings differ."""

    engine: Engine
    info: EngineInfo
    used: Utilisation

    def __init__(self, peak: float | None) -> None:
        self._peak = peak
        self._config: EngineConfig | None = None
        self._num_visits = 0

    def _change(self, case: ThroughputCase) -> None:
        if self._config is not None:
            self.engine.close()
            del self.engine  # its memory is for the next one
            gc.collect()
        self.engine, self.info = build_prepared(case.config)
        self.used = Utilisation.of(case.config, self.info.device, self._peak)
        self._config = case.config
        count, length = min(case.work.num_prompts, self.info.max_num_seqs), case.work.input_len
        check_fit(self.info, 1, length + case.work.output_len)
        complete(self.engine, random_requests(count, length, WARM_UP_TOKENS, self.info.vocab_size, 1 << 20, seed=1))

    def visit(self, case: ThroughputCase) -> Figures:
        """Serve a case's requests."""
        if case.config != self._config:
            self._change(case)
        engine, info, work = self.engine, self.info, case.work
        check_fit(info, 1, work.input_len + work.output_len)
        most_blocks, empty_share, most_context = 0, 0.0, 0

        def look() -> None:
            nonlocal most_blocks, empty_share, most_context
            stats = engine.stats()
            most_context = max(most_context, stats.num_used_blocks * info.block_size - stats.num_empty_slots)
            if stats.num_used_blocks > most_blocks:
                most_blocks = stats.num_used_blocks
                empty_share = stats.num_empty_slots / (most_blocks * info.block_size)

        self._num_visits += 1
        before = engine.stats()
        visit, figures = serve(engine, work.requests(info.vocab_size, self._num_visits), work.gap, look)
        stats, requests_s = engine.stats(), work.num_prompts / visit.seconds
        arithmetic = self.used.requests(requests_s, work.input_len, work.output_len) if not work.shared_len else {}
        return {
            "seconds": visit.seconds,
            "steps": stats.num_steps - before.num_steps,
            "preemptions": stats.num_preemptions - before.num_preemptions,
            "prefix_hits": stats.prefix_hits - before.prefix_hits,
            "blocks": info.num_kv_blocks,
            "most_used_blocks": most_blocks,
            "empty_slots_percent": 100 * empty_share,
            "context_tokens": most_context,
            "requests_s": requests_s,
            **figures,
            "total_tok_s": requests_s * (work.input_len + work.output_len),
            **arithmetic,
        }
