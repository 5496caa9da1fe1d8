"""HTTP load in the forms that GPT-2 is measured by: many at a time, and arrivals at once, evenly and at random."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from octavo.bench.server_process import ServerProcess, free_port
from octavo.bench.suite_sizes import PROMPT_WORDS, Sizes
from octavo.bench.suites import Row, row
from octavo.errors import ConfigError

READY_SECONDS = 300.0
STEADY_SECONDS = 0.1
POISSON_RATE = 10.0


def served(model: Path, arguments: Sequence[str], sizes: Sizes, rounds: int, log: Path) -> Iterator[Row]:
    """Start a server for the model's folder with more arguments, and load it. Raises ``ConfigError``."""
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(port), *arguments]
    with ServerProcess(command, f"http://127.0.0.1:{port}", log=log) as server:
        server.wait_ready(READY_SECONDS)
        asyncio.run(_at_once(server.url, _text("short"), sizes.output, max(sizes.concurrencies), 1))
        for length in PROMPT_WORDS:
            for places in sizes.concurrencies:
                values = [
                    asyncio.run(_at_once(server.url, _text(length), sizes.output, places, sizes.repeats))
                    for _ in range(rounds)
                ]
                yield row(sizes, "http tok/s", f"{length}, {places}", values)
        for pattern in ("burst", "steady", "poisson"):
            seconds = asyncio.run(_arrivals(server.url, pattern, sizes))
            tail = statistics.quantiles(seconds, n=100, method="inclusive")[98]
            yield row(
                sizes, "http latency ms", pattern, [1e3 * statistics.median(seconds)], p99_ms=round(1e3 * tail, 1)
            )


def _text(length: str) -> str:
    rng = random.Random(length)
    return " ".join("".join(rng.choices("bdgklmnprst", k=2)) + "a" for _ in range(PROMPT_WORDS[length]))


async def _ask(client: httpx.AsyncClient, text: str, output: int) -> int:
    response = await client.post("/generate", json={"prompt": text, "max_tokens": output})
    if response.status_code != 200:
        raise ConfigError(f"the server answered {response.status_code}: {response.text[:200]}")
    return int(response.json()["token_count"])


def _client(url: str, places: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=places, max_keepalive_connections=places)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


async def _at_once(url: str, text: str, output: int, places: int, repeats: int) -> float:
    """Tokens per second while ``places`` clients ask ``repeats`` times each, one after the other."""

    async def keep_asking() -> int:
        return sum([await _ask(client, f"{text} {i}", output) for i in range(repeats)])

    async with _client(url, places) as client:
        start = time.perf_counter()
        counts = await asyncio.gather(*(keep_asking() for _ in range(places)))
        return sum(counts) / (time.perf_counter() - start)


async def _arrivals(url: str, pattern: str, sizes: Sizes) -> list[float]:
    """Seconds of each request, whenever it arrives."""
    rng = random.Random(42)
    gaps = {"burst": lambda: 0.0, "steady": lambda: STEADY_SECONDS, "poisson": lambda: rng.expovariate(POISSON_RATE)}

    async def timed(client: httpx.AsyncClient, delay: float) -> float:
        await asyncio.sleep(delay)
        start = time.perf_counter()
        await _ask(client, _text("short"), sizes.output)
        return time.perf_counter() - start

    delays, at = [], 0.0
    for _ in range(sizes.arrivals):
        delays.append(at)
        at += gaps[pattern]()
    async with _client(url, sizes.arrivals) as client:
        return list(await asyncio.gather(*(timed(client, delay) for delay in delays)))
