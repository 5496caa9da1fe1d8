"""Throughput with one setting, or one length, at several values; and decoding without a KV cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig, to_flat
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.types import Request
from octavo_bench.ablation import serve
from octavo_bench.offline import check_fit, checked_step, random_requests, time_decode, time_prefill
from octavo_bench.report import spread

Figures = dict[str, float]
Report = Callable[[str], None]
WARM_UP_TOKENS = 4


class SweepWork(NamedTuple):
    """Requests that come ``gap`` seconds apart. Their prompts begin with the same ``shared_len`` tokens."""

    num_prompts: int
    input_len: int
    output_len: int
    shared_len: int = 0
    gap: float = 0.0

    def requests(self, vocab_size: int) -> list[Request]:
        own = random_requests(
            self.num_prompts, self.input_len - self.shared_len, self.output_len, vocab_size, 1, seed=2
        )
        (shared,) = random_requests(1, self.shared_len, 1, vocab_size, 1, seed=3)
        return [Request(one.id, [*shared.prompt_tokens, *one.prompt_tokens], one.params, one.max_tokens) for one in own]


LENGTHS = ("input_len", "output_len", "shared_len")
"""What can vary besides the settings of an engine."""
OF_PREFIXES = ("enable_prefix_caching", "enable_partial_reuse")
"""Settings that change nothing where prompts share nothing."""


def sweep(
    config: EngineConfig, work: SweepWork, vary: str, values: Sequence[Any], rounds: int, report: Report
) -> Iterator[dict[str, Any]]:
    """A row for each value: throughput and latency, preemptions, blocks, and the most tokens of context held at once.

    In turns, each time with a fresh engine.

    Raises ``ConfigError`` for a setting that there is not, and for lengths that are none.
    """
    flat = to_flat(config)
    if not work.shared_len < work.input_len:
        raise ConfigError(f"shared_len: must be below input_len, {work.input_len}")
    if vary in OF_PREFIXES and not work.shared_len:
        raise ConfigError(
            f"vary: {vary} changes nothing for prompts that share nothing; --shared-len says how much they do"
        )
    if vary not in flat and vary not in LENGTHS:
        raise ConfigError(f"vary: {vary!r} is neither a setting of the engine nor one of {', '.join(LENGTHS)}")
    if vary in LENGTHS and not all(isinstance(value, int) and value > 0 for value in values):
        raise ConfigError(f"values: {vary} must be integers of at least 1")
    runs: dict[Any, list[Figures]] = {value: [] for value in values}
    for _ in range(rounds):
        for value in values:
            own = work._replace(**{vary: value}) if vary in LENGTHS else work
            settings = flat if vary in LENGTHS else {**flat, vary: value}
            runs[value].append(_served(EngineConfig.from_flat(settings), own))
            report(f"{vary} {value}: {runs[value][-1]['output_tok_s']:.1f} output tokens/s")
    for value, found in runs.items():
        yield {vary: value, **{name: spread([run[name] for run in found]) for name in found[0]}}


def _served(config: EngineConfig, work: SweepWork) -> Figures:
    gc.collect()  # the engine before
    engine, info = build_engine(config)
    check_fit(info, 1, work.input_len + work.output_len)
    for request in random_requests(2, work.input_len, WARM_UP_TOKENS, info.vocab_size, 1 << 20, seed=1):
        engine.add(request)
    while engine.has_work:
        checked_step(engine)
    most_blocks, empty_share, most_context = 0, 0.0, 0

    def look() -> None:
        nonlocal most_blocks, empty_share, most_context
        stats = engine.stats()
        most_context = max(most_context, stats.num_used_blocks * info.block_size - stats.num_empty_slots)
        if stats.num_used_blocks > most_blocks:
            most_blocks = stats.num_used_blocks
            empty_share = stats.num_empty_slots / (most_blocks * info.block_size)

    visit, figures = serve(engine, work.requests(info.vocab_size), work.gap, look)
    stats = engine.stats()
    return {
        "preemptions": stats.num_preemptions,
        "prefix_hits": stats.prefix_hits,
        "blocks": info.num_kv_blocks,
        "most_used_blocks": most_blocks,
        "empty_slots_percent": 100 * empty_share,
        "context_tokens": most_context,
        **figures,
        "total_tok_s": work.num_prompts * (work.input_len + work.output_len) / visit.seconds,
    }


def without_cache(config: EngineConfig, lengths: Sequence[int], tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each length of context: time of a token with a KV cache, and without, when all is computed again.

    Raises ``ConfigError`` if a length does not fit.
    """
    engine, info = build_engine(EngineConfig.from_flat({**to_flat(config), "enable_prefix_caching": False}))
    check_fit(info, 1, max(lengths) + tokens + 2)
    for length in lengths:
        runs = [_both_ways(engine, info.vocab_size, length, tokens) for _ in range(rounds + 1)][1:]
        for run in runs:
            run |= {name.replace("_ms", "_tok_s"): 1e3 / ms for name, ms in run.items()}
        figures = {name: spread([run[name] for run in runs]) for name in runs[0]}
        slower = figures["recomputed_ms"]["median"] / figures["cached_ms"]["median"]
        yield {"context": length, **figures, "times_slower": round(slower, 2)}


def _both_ways(engine: Engine, vocab_size: int, length: int, tokens: int) -> Figures:
    cached = random_requests(1, length, tokens + 2, vocab_size, 1, seed=length)
    cached_ms = 1e3 / time_decode(engine, cached, tokens)
    seconds = 0.0
    for number in range(tokens):
        (request,) = random_requests(1, length + number, 1, vocab_size, 1, seed=length)
        seconds += len(request.prompt_tokens) / time_prefill(engine, [request])
    return {"cached_ms": cached_ms, "recomputed_ms": 1e3 * seconds / tokens}
