"""The limit of memory, found by trying: each try is a process of its own, which may fail in any way."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from octavo.errors import ConfigError

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


def memory_limit(
    model: Sequence[str], gib: float | None, longest: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """The longest context, up to ``longest`` tokens, of one sequence that is served, and a row for each try.

    ``model``: flags that name the model. A try may have ``gib`` GiB of data in host memory; ``None``: all there is.
    Raises ``ConfigError`` if the shortest does not fit.
    """
    tries: dict[int, Try] = {}

    def is_served(parts: int) -> bool:
        length = longest * parts // PARTS
        done = tries[length] = _try_length(model, gib, length)
        report(f"{length} tokens: {done.reason or 'served'}")
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
    model: Sequence[str], gib: float | None, most: int, length: int, longest: int, report: Callable[[str], None]
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
            report(f"{cache}: {count} sequences: {done.reason or 'served'}")
            rows.append({"cache": cache, "sequences": count, **done.figures()})
            least, first_failed = (least, count) if done.reason else (count, first_failed)
            count = min(2 * count, most) if first_failed > most else (least + first_failed) // 2
        if least == 0:
            raise ConfigError(f"limit: not one sequence of {length} tokens fits: {rows[-1]['failed']}")
        largest[cache] = least
    rows.sort(key=lambda row: (row["cache"] != "paged", row["sequences"]))
    return {"largest_batch": largest, "rows": rows}


def _try_length(model: Sequence[str], gib: float | None, length: int) -> Try:
    return _try(model, gib, length, 1, BLOCK_SIZE)


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
