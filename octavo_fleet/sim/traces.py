"""Replay of recorded traces: arrival times and token counts of requests.

- Mooncake (arXiv 2407.00079), JSON lines: ``timestamp`` in ms, ``input_length``, ``output_length``, and ``hash_ids``,
  one for each 512 tokens of the prompt; equal ids are equal text after equal text.
- Azure LLM inference traces (Splitwise, arXiv 2311.18677), CSV: ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.
- BurstGPT (arXiv 2401.17644), CSV: ``Timestamp`` in seconds, ``Request tokens``, ``Response tokens``.
- What ``vllm bench serve --save-result --save-detailed`` writes, JSON: ``input_lens``, ``output_lens``, and
  ``start_times`` where the version writes it; else all come at ``request_rate``, evenly.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo_fleet.sim.jobs import Awaits, Job, Segment

MOONCAKE_BLOCK = 512
OWN_TEXTS = 1 << 32
"""Tokens from here on stand for text that no other request shares."""


class Trace:
    """Jobs read from a file as they are due; each arrives at its recorded time.

    A job recorded after a later one arrives together with that one.
    """

    awaits: Awaits = "none"

    def __init__(self, path: Path, num_requests: int | None = None) -> None:
        self.path = path
        self.num_left = num_requests
        self._entries: Iterator[Entry] | None = None
        """``None`` until first used, so that a trace can be sent to another process."""
        self._number = 0
        self._first = self._latest = 0.0

    def next_job(self) -> Job | None:
        if self.num_left == self._number:
            return None
        try:
            if self._entries is None:
                self._entries = _entries(self.path)
            entry = next(self._entries, None)
        except OSError as error:
            raise ConfigError(f"workload: cannot read {self.path}: {error.strerror}") from None
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"workload: entry {self._number + 1} of {self.path} cannot be read: {error}") from None
        if entry is None:
            return None
        seconds, prompt, output_len = entry
        if not self._number:
            self._first = seconds
        self._number += 1
        self._latest = max(self._latest, seconds - self._first)
        own = OWN_TEXTS + 2 * self._number
        if not isinstance(prompt, tuple):
            prompt = ((own, max(1, prompt)),)
        return Job(self._latest, prompt, max(1, output_len), own + 1)

    def after(self, job: Job, now: float) -> Job | None:
        return None


Entry = tuple[float, "int | tuple[Segment, ...]", int]
"""Seconds, the prompt or its length, output tokens."""


def _entries(path: Path) -> Iterator[Entry]:
    with path.open(encoding="utf-8") as file:
        start = file.readline()
        file.seek(0)
        if not start.lstrip().startswith("{"):
            yield from _csv_entries(csv.DictReader(file))
            return
        try:
            is_lines = "hash_ids" in (first := json.loads(start)) or "input_length" in first
        except ValueError:
            is_lines = False
        if is_lines:
            yield from (_mooncake(json.loads(line)) for line in file if line.strip())
        else:
            yield from _bench_entries(json.load(file))


def _mooncake(entry: dict[str, Any]) -> Entry:
    length = int(entry["input_length"])
    seconds, output_len = float(entry["timestamp"]) / 1000, int(entry["output_length"])
    hashes = entry.get("hash_ids")
    if not hashes:
        return seconds, length, output_len
    sizes = [min(MOONCAKE_BLOCK, length - i * MOONCAKE_BLOCK) for i in range(len(hashes))]
    prompt = tuple((int(name) + 1, size) for name, size in zip(hashes, sizes, strict=True) if size > 0)
    return seconds, prompt, output_len


def _csv_entries(rows: csv.DictReader[str]) -> Iterator[Entry]:
    for row in rows:
        if "ContextTokens" in row:
            yield _seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        elif "Request tokens" in row:
            yield float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])
        else:
            raise ValueError(f"columns {', '.join(row)} are of no known trace")


def _seconds(stamp: str) -> float:
    """Seconds of a time of day with up to seven decimals, as .NET writes it."""
    whole, _, fraction = stamp.strip().partition(".")
    return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")


def _bench_entries(result: dict[str, Any]) -> Iterator[Entry]:
    inputs, outputs = result["input_lens"], result["output_lens"]
    rate = float(result.get("request_rate") or "inf")
    starts = result.get("start_times") or [0.0 if rate == float("inf") else i / rate for i in range(len(inputs))]
    yield from sorted(zip(map(float, starts), map(int, inputs), map(int, outputs), strict=True))
