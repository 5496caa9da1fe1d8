"""What serving costs besides the model: processor time of the front process per streamed token, and even streams.

A front process with the real HTTP server, admission, journal, detokenizer and streams runs in front of a paced
engine. Streams are read over loopback connections; the front process's own user and system time is divided by
the tokens it delivered. While others ask with long prompts or hostile schemas, the gaps of the streams tell what
holds them up. Loads are measured in turns, so that a machine that is busy with other things is so for all of them.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.bench.server_process import ServerProcess, free_port
from octavo.bench.stream_reader import Ask, Streamed, completion, read_streams

READY_SECONDS = 60.0
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "how", "many", "birds", "flew", "over", "old", "houses")
MAX_PROMPT_BYTES = 8 << 10


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far, in all its threads (POSIX ``clock_getcpuclockid``)."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        raise ProcessLookupError(f"there is no process {pid}")
    return time.clock_gettime(clock.value)


def text_of(length: int, source: random.Random) -> str:
    """Words of at least ``length`` bytes in all."""
    words: list[str] = []
    size = 0
    while size < length:
        words.append(source.choice(WORDS))
        size += len(words[-1]) + 1
    return " ".join(words)


def newcomers(rate: float, seconds: float, burst: int, seed: int) -> Iterator[Ask]:
    """Requests of 4 tokens with prompts of 0.5 to 8 KiB, ``rate`` a second, ``burst`` at a time, from 1 second on."""
    source = random.Random(seed)
    for number in range(int(rate * seconds / burst)):
        for _ in range(burst):
            size = source.choice((512, 1 << 10, 2 << 10, 4 << 10, MAX_PROMPT_BYTES))
            yield Ask(1.0 + number * burst / rate, completion(text_of(size, source), 4), watched=False)


def schemas(rate: float, seconds: float, seed: int) -> Iterator[Ask]:
    """Requests with JSON schemas that take as long as any to be refused or compiled; no two are the same."""
    source = random.Random(seed)
    for number in range(int(rate * seconds)):
        salt = str(source.getrandbits(64))
        schema: dict[str, Any] = {"type": "string", "pattern": "((a{0,100}){0,100}){0,100}" + salt}
        if number % 2:
            schema = {"type": "string", "description": salt}
            for _ in range(8):
                schema = {"allOf": [{"anyOf": [schema, {"type": kind}]} for kind in ("integer", "boolean")]}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        yield Ask(0.2 + number / rate, completion("Say it", 4, response_format=wanted), watched=False)


class FrontProcess:
    """A front process before a paced engine, and what it used so far."""

    def __init__(self, step_ms: float, model: Path) -> None:
        self.port = free_port()
        module = "octavo.bench.front_process"
        command = [sys.executable, "-m", module, str(self.port), str(step_ms), str(model)]
        self.server = ServerProcess(command, f"http://127.0.0.1:{self.port}")

    def __enter__(self) -> FrontProcess:
        self.server.wait_ready(READY_SECONDS)
        read_streams(self.port, [Ask(0.0, completion("Once upon a time", 20))] * 4)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()

    def measure(self, streams: int, tokens: int, others: Iterable[Ask] = ()) -> dict[str, Any]:
        """One row: what ``streams`` at a time cost and saw while ``others`` came."""
        pid = self.server.process.pid
        asks = [Ask(0.0, completion("Once upon a time", tokens))] * streams
        before, start = cpu_seconds(pid), time.perf_counter()
        answers = read_streams(self.port, [*asks, *others])
        used, seconds = cpu_seconds(pid) - before, time.perf_counter() - start
        watched = [one for one in answers if one.ask.watched]
        total = streams * tokens
        return {
            "others": len(answers) - streams,
            "tokens": total,
            "events_per_token": round(sum(one.num_events for one in watched) / total, 4),
            "tokens_per_second": round(total / seconds, 1),
            "front_cpu_us_per_token": round(used / total * 1e6, 2),
            "front_cpu_share": round(used / seconds, 3),
            "gap_ms": gaps_ms(watched),
        }


def gaps_ms(answers: Sequence[Streamed]) -> dict[str, float]:
    """Of all gaps between the pieces of all streams, without the start when they come one after the other."""
    gaps = [gap * 1e3 for one in answers for gap in one.gaps[len(one.gaps) // 20 :]]
    percentiles = statistics.quantiles(gaps, n=1000)
    return {
        "p50": round(percentiles[499], 2),
        "p99": round(percentiles[989], 2),
        "p999": round(percentiles[998], 2),
        "max": round(max(gaps), 2),
    }


class Loads(NamedTuple):
    """What comes while the streams go on; each is measured in turn with the streams alone."""

    newcomers: float = 0.0
    """Requests a second with long prompts."""
    burst: int = 1
    """How many of them come together."""
    schemas: float = 0.0
    """Requests a second with hostile schemas."""

    def asks(self, seconds: float, seed: int) -> Iterator[tuple[str, list[Ask]]]:
        """Each load's name and requests, for a stream of so many seconds."""
        yield "none", []
        if self.newcomers:
            yield "newcomers", list(newcomers(self.newcomers, seconds - 1.0, self.burst, seed))
        if self.schemas:
            yield "schemas", list(schemas(self.schemas, seconds - 0.2, seed))


def measure(
    sizes: Sequence[int], tokens: int, steps_ms: Sequence[float], loads: Loads, rounds: int, model: Path
) -> dict[str, Any]:
    """Each pace and number of streams with each load, in turns, ``rounds`` times; medians and all single runs."""
    medians, runs = [], []
    for step_ms in steps_ms:
        with FrontProcess(step_ms, model) as front:
            for streams in sizes:
                found: dict[str, list[dict[str, Any]]] = {}
                for number in range(rounds):
                    for name, others in loads.asks(tokens * step_ms / 1e3, number):
                        found.setdefault(name, []).append(front.measure(streams, tokens, others))
                for name, rows in found.items():
                    place = {"step_ms": step_ms, "streams": streams, "load": name}
                    runs += [{**place, **row} for row in rows]
                    medians.append({**place, **median_of(rows, found["none"])})
    return {"rows": medians, "runs": runs}


def median_of(rows: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The medians of the runs with one load, and how they compare with those without any."""
    p99 = statistics.median(row["gap_ms"]["p99"] for row in rows)
    return {
        "front_cpu_us_per_token": statistics.median(row["front_cpu_us_per_token"] for row in rows),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "events_per_token": statistics.median(row["events_per_token"] for row in rows),
        "gap_ms_p50": statistics.median(row["gap_ms"]["p50"] for row in rows),
        "gap_ms_p99": p99,
        "gap_p99_to_alone": round(p99 / statistics.median(row["gap_ms"]["p99"] for row in alone), 3),
    }
