"""HTTP load in the forms that GPT-2 is measured by: many at a time, and arrivals at once, evenly and at random.

The client is that of the proxy: at 64 at a time, a general library took 10 ms of processor time for each, more than the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.errors import ConfigError
from octavo_bench.server_process import ServerProcess, free_port
from octavo_bench.suite_sizes import PROMPT_WORDS, SuiteSizes
from octavo_bench.suites import Row, row
from octavo_fleet.proxy.connections import Connections, Headers

READY_SECONDS = 300.0
STEADY_SECONDS = 0.1
POISSON_RATE = 10.0
HEADERS: Headers = [(b"content-type", b"application/json")]


def served(model: Path, arguments: Sequence[str], sizes: SuiteSizes, rounds: int, log: Path) -> Iterator[Row]:
    """Start a server for the model's folder with more arguments, and load it. Raises ``ConfigError``."""
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(port), *arguments]
    with ServerProcess(command, f"http://127.0.0.1:{port}", log=log) as server:
        server.wait_ready(READY_SECONDS)
        asyncio.run(_at_once(port, _text("short"), sizes.output, max(sizes.concurrencies), 1))
        for length in PROMPT_WORDS:
            for places in sizes.concurrencies:
                values = [
                    asyncio.run(_at_once(port, _text(length), sizes.output, places, sizes.repeats))
                    for _ in range(rounds)
                ]
                yield row(sizes, "http tok/s", f"{length}, {places}", values)
        for pattern in ("burst", "steady", "poisson"):
            seconds = asyncio.run(_arrivals(port, pattern, sizes))
            tail = statistics.quantiles(seconds, n=100, method="inclusive")[98]
            yield row(
                sizes, "http latency ms", pattern, [1e3 * statistics.median(seconds)], p99_ms=round(1e3 * tail, 1)
            )


def _text(length: str) -> str:
    rng = random.Random(length)
    return " ".join("".join(rng.choices("bdgklmnprst", k=2)) + "a" for _ in range(PROMPT_WORDS[length]))


async def _ask(client: Connections, text: str, output: int) -> int:
    """Tokens that were made. Raises ``ConfigError`` for an answer that is none."""
    body = json.dumps({"prompt": text, "max_tokens": output}).encode()
    async with client.request("POST", "generate", HEADERS, body) as connection:
        answer = await connection.read_all()
        if connection.status != 200:
            raise ConfigError(f"the server answered {connection.status}: {answer[:200].decode(errors='replace')}")
    return int(json.loads(answer)["token_count"])


@contextlib.contextmanager
def _connected(port: int) -> Iterator[Connections]:
    client = Connections(f"http://127.0.0.1:{port}/")
    try:
        yield client
    finally:
        client.close()


async def _at_once(port: int, text: str, output: int, places: int, repeats: int) -> float:
    """Tokens per second while ``places`` clients ask ``repeats`` times each, one after the other."""

    async def keep_asking() -> int:
        with _connected(port) as client:
            return sum([await _ask(client, f"{text} {i}", output) for i in range(repeats)])

    start = time.perf_counter()
    counts = await asyncio.gather(*(keep_asking() for _ in range(places)))
    return sum(counts) / (time.perf_counter() - start)


async def _arrivals(port: int, pattern: str, sizes: SuiteSizes) -> list[float]:
    """Seconds of each request, whenever it arrives."""
    rng = random.Random(42)
    gaps = {"burst": lambda: 0.0, "steady": lambda: STEADY_SECONDS, "poisson": lambda: rng.expovariate(POISSON_RATE)}

    async def timed(delay: float) -> float:
        await asyncio.sleep(delay)
        start = time.perf_counter()
        with _connected(port) as client:
            await _ask(client, _text("short"), sizes.output)
        return time.perf_counter() - start

    delays, at = [], 0.0
    for _ in range(sizes.arrivals):
        delays.append(at)
        at += gaps[pattern]()
    return list(await asyncio.gather(*(timed(delay) for delay in delays)))
