"""HTTP load in the forms that GPT-2 is measured by: many at a time, and arrivals at once, evenly and at random.

The client is a connection and the bytes of a request: at 64 at a time, a library with a pool took 10 ms of processor
time for each, more than the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from octavo.errors import ConfigError
from octavo_bench.server_process import ServerProcess, free_port
from octavo_bench.suite_sizes import PROMPT_WORDS, SuiteSizes
from octavo_bench.suites import Row, row

READY_SECONDS = 300.0
STEADY_SECONDS = 0.1
POISSON_RATE = 10.0


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


class _Connection:
    """One that is kept for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, text: str, output: int) -> int:
        """Tokens that were made. Raises ``ConfigError`` for an answer that is none."""
        body = json.dumps({"prompt": text, "max_tokens": output}).encode()
        head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._writer.write(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        status, *fields = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(field.split(":")[1]) for field in fields if field.lower().startswith("content-length:"))
        answer = await self._reader.readexactly(length)
        if " 200 " not in status:
            raise ConfigError(f"the server answered {status}: {answer[:200].decode()}")
        return int(json.loads(answer)["token_count"])


@contextlib.asynccontextmanager
async def _connected(port: int) -> AsyncIterator[_Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield _Connection(reader, writer)
    finally:
        writer.close()


async def _at_once(port: int, text: str, output: int, places: int, repeats: int) -> float:
    """Tokens per second while ``places`` clients ask ``repeats`` times each, one after the other."""

    async def keep_asking() -> int:
        async with _connected(port) as connection:
            return sum([await connection.ask(f"{text} {i}", output) for i in range(repeats)])

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
        async with _connected(port) as connection:
            await connection.ask(_text("short"), sizes.output)
        return time.perf_counter() - start

    delays, at = [], 0.0
    for _ in range(sizes.arrivals):
        delays.append(at)
        at += gaps[pattern]()
    return list(await asyncio.gather(*(timed(delay) for delay in delays)))
