"""Throughput with one setting, or one length, at several values; decoding without a KV cache; and the limit of memory,
found by trying: each try is a process of its own, which may fail in any way."""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.build.build_engine import build_engine
from octavo.cli.settings import setting_flags
from octavo.config import EngineConfig, to_flat
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.types import Request
from octavo_bench.ablation import serve
from octavo_bench.offline import check_fit, complete, random_requests, time_decode, time_prefill
from octavo_bench.report import Say, spreads

Figures = dict[str, float]
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
    config: EngineConfig, work: SweepWork, vary: str, values: Sequence[str], rounds: int, say: Say
) -> dict[str, Any]:
    """A row for each value: throughput and latency, preemptions, blocks, and the most tokens of context held at once.

    In turns, each time with a fresh engine.

    Raises ``ConfigError`` for a setting that there is not, and for lengths that are none.
    """
    flat, vary, tried = to_flat(config), vary.replace("-", "_"), [_value(text) for text in values]
    if not work.shared_len < work.input_len:
        raise ConfigError(f"shared_len: must be below input_len, {work.input_len}")
    if vary in OF_PREFIXES and not work.shared_len:
        raise ConfigError(
            f"vary: {vary} changes nothing for prompts that share nothing; --shared-len says how much they do"
        )
    if vary not in flat and vary not in LENGTHS:
        raise ConfigError(f"vary: {vary!r} is neither a setting of the engine nor one of {', '.join(LENGTHS)}")
    if vary in LENGTHS and not all(isinstance(value, int) and value > 0 for value in tried):
        raise ConfigError(f"values: {vary} must be integers of at least 1")
    runs: dict[Any, list[Figures]] = {value: [] for value in tried}
    for _ in range(rounds):
        for value in tried:
            own = work._replace(**{vary: value}) if vary in LENGTHS else work
            settings = flat if vary in LENGTHS else {**flat, vary: value}
            runs[value].append(_served(EngineConfig.from_flat(settings), own))
            say(f"{vary} {value}: {runs[value][-1]['output_tok_s']:.1f} output tokens/s")
    rows = [{vary: value, **spreads(found)} for value, found in runs.items()]
    return {"model": Path(config.model.model).name, **work._asdict(), "rows": rows}


def _value(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _served(config: EngineConfig, work: SweepWork) -> Figures:
    gc.collect()  # the engine before
    engine, info = build_engine(config)
    check_fit(info, 1, work.input_len + work.output_len)
    complete(engine, random_requests(2, work.input_len, WARM_UP_TOKENS, info.vocab_size, 1 << 20, seed=1))
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


def without_cache(config: EngineConfig, lengths: Sequence[int], tokens: int, rounds: int) -> dict[str, Any]:
    """A row for each length of context: time of a token with a KV cache, and without, when all is computed again.

    Raises ``ConfigError`` if a length does not fit.
    """
    engine, info = build_engine(EngineConfig.from_flat({**to_flat(config), "enable_prefix_caching": False}))
    check_fit(info, 1, max(lengths) + tokens + 2)
    rows = []
    for length in lengths:
        runs = [_both_ways(engine, info.vocab_size, length, tokens) for _ in range(rounds + 1)][1:]
        for run in runs:
            run |= {name.replace("_ms", "_tok_s"): 1e3 / ms for name, ms in run.items()}
        figures = spreads(runs)
        slower = figures["recomputed_ms"]["median"] / figures["cached_ms"]["median"]
        rows.append({"context": length, **figures, "times_slower": round(slower, 2)})
    return {"model": Path(config.model.model).name, "rows": rows}


def _both_ways(engine: Engine, vocab_size: int, length: int, tokens: int) -> Figures:
    cached = random_requests(1, length, tokens + 2, vocab_size, 1, seed=length)
    cached_ms = 1e3 / time_decode(engine, cached, tokens)
    seconds = 0.0
    for number in range(tokens):
        (request,) = random_requests(1, length + number, 1, vocab_size, 1, seed=length)
        seconds += len(request.prompt_tokens) / time_prefill(engine, [request])
    return {"cached_ms": cached_ms, "recomputed_ms": 1e3 * seconds / tokens}


PARTS = 32
"""The limit is found to this part of the longest context."""
TRY_SECONDS = 600
BLOCK_SIZE = 16
CHUNK = 512
"""Prompt tokens of a step."""
DECODE = 4


class Try(NamedTuple):
    """What came of serving one sequence."""

    reason: str
    """Why it was not served; "" if it was."""
    peak_memory_mib: float | None = None
    """Most memory of the process, or of torch on a GPU."""

    def figures(self) -> dict[str, Any]:
        return {"peak_memory_mib": self.peak_memory_mib, "failed": self.reason}


def limit(
    config: EngineConfig,
    longest: int,
    context: int,
    say: Say,
    memory: float | None = None,
    sequences: int | None = None,
) -> dict[str, Any]:
    """``memory_limit``, or ``largest_batches`` of up to ``sequences``."""
    flags = ["--model", config.model.model, *setting_flags(config)]
    if sequences is None:
        found = memory_limit(flags, memory, longest, say)
    else:
        found = largest_batches(flags, memory, sequences, context, longest, say)
    return {"model": Path(config.model.model).name, "memory": memory or "all", **found}


def memory_limit(model: Sequence[str], gib: float | None, longest: int, say: Say) -> dict[str, Any]:
    """The longest context, up to ``longest`` tokens, of one sequence that is served, and a row for each try.

    ``model``: flags that name the model. A try may have ``gib`` GiB of data in host memory; ``None``: all there is.
    Raises ``ConfigError`` if the shortest does not fit.
    """
    tries: dict[int, Try] = {}

    def is_served(parts: int) -> bool:
        length = longest * parts // PARTS
        done = tries[length] = _try(model, gib, length, 1, BLOCK_SIZE)
        say(f"{length} tokens: {done.reason or 'served'}")
        return not done.reason

    least, most = (PARTS, PARTS) if is_served(PARTS) else (0, PARTS)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if is_served(middle) else (least, middle)
    if least == 0:
        shortest = longest // PARTS
        raise ConfigError(f"limit: {shortest} tokens do not fit: {tries[shortest].reason}")
    rows = [{"context": length, **done.figures()} for length, done in sorted(tries.items())]
    return {"longest_context": longest * least // PARTS, "rows": rows}


def largest_batches(
    model: Sequence[str], gib: float | None, most: int, length: int, longest: int, say: Say
) -> dict[str, Any]:
    """The most sequences of ``length`` tokens, up to ``most``, that are served together: with blocks for their tokens
    (paged), and with a place for ``longest`` tokens each (contiguous); and a row for each try.

    Raises ``ConfigError`` if not one fits.
    """
    rows, largest = [], {}
    for cache, block_size in (("paged", BLOCK_SIZE), ("contiguous", longest)):
        least, first_failed = 0, most + 1
        count = min(most, 1)
        while first_failed - least > 1:
            done = _try(model, gib, length, count, block_size)
            say(f"{cache}: {count} sequences: {done.reason or 'served'}")
            rows.append({"cache": cache, "sequences": count, **done.figures()})
            least, first_failed = (least, count) if done.reason else (count, first_failed)
            count = min(2 * count, most) if first_failed > most else (least + first_failed) // 2
        if least == 0:
            raise ConfigError(f"limit: not one sequence of {length} tokens fits: {rows[-1]['failed']}")
        largest[cache] = least
    rows.sort(key=lambda row: (row["cache"] != "paged", row["sequences"]))
    return {"largest_batch": largest, "rows": rows}


def _try(model: Sequence[str], gib: float | None, length: int, count: int, block_size: int) -> Try:
    """Serve ``count`` sequences of ``length`` tokens.

    Raises ``ConfigError`` for a length that the model refuses, whatever memory there is.
    """

    def restrict() -> None:
        if gib is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)

    # Steps of the prompt and two more may each add a token before those that are timed.
    prompt = length - DECODE - 2 - -(-length // CHUNK)
    work = {"sequences": count, "prompt": prompt, "decode": DECODE, "rounds": 1, "max-num-batched-tokens": CHUNK}
    blocks = count * -(-length // block_size)
    context = max(length, block_size) if block_size > BLOCK_SIZE else length
    sizes = {"max-model-len": context, "num-kv-blocks": blocks, "block-size": block_size}
    flags = [text for name, value in {**work, **sizes}.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "octavo", "bench", "offline", *model, *flags]
    try:
        ended = subprocess.run(
            command, preexec_fn=restrict, capture_output=True, text=True, timeout=TRY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Try(f"no result after {TRY_SECONDS} s")
    if ended.returncode == 0:
        return Try("", round(json.loads(ended.stdout)["result"]["peak_memory_bytes"] / 2**20, 1))
    reason = (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1][:200]
    if "max_model_len" in reason:  # no limit of memory
        raise ConfigError(f"limit: {length} tokens: {reason.removeprefix('octavo: error: ')}")
    return Try(reason)
