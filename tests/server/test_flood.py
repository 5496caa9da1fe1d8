"""A hundred connections that send heads and bodies without an end, and a stream beside them.

``python -m tests.server.test_flood PORT PID`` does the same for a minute to a server that runs already, and prints what
became of the front process's memory and of the stream's longest gap, alone and beside the flood. The hundred clients
run with ``os.nice(10)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.raw import read_head, request_bytes

pytestmark = pytest.mark.slow

NUM_CONNECTIONS = 100
MAX_GROWTH = 64 << 20
ENOUGH_SENT = 4 * MAX_GROWTH
"""Bytes of all attacks: kept, they would be more than the memory may grow."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
_LONG = b"Content-Length: 33000000\r\n\r\n"
_SPACES = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
ATTACKS: list[tuple[bytes, bytes, float]] = [
    (_GET, b"a:\r\n" * 4096, 0),
    (_GET + b"x: ", b"a" * 16384, 0),
    (b"GET /", b"a" * 16384, 0),
    (_GET, b"a: b\r\n", 0.2),
    (_GET + b"x: ", b"a", 0.2),
    (_POST % b"/v1/completions" + _LONG, b" " * 16384, 0),
    (_POST % b"/v1/completions" + _CHUNKED, _SPACES, 0),
    (_POST % b"/v1/chat/completions" + _LONG, b" " * 64, 0.2),
    (_POST % b"/health" + _CHUNKED + b"0\r\n", b"a:\r\n" * 4096, 0),
    (_POST % b"/nowhere" + _LONG, b" " * 16384, 0),
]
"""What comes first, what comes again and again, and the seconds between."""


async def attack(port: int, number: int, num_sent: Counter[int]) -> None:
    """One connection, and another one when the server has closed it. ``num_sent``: bytes of each attack."""
    start, piece, pause = ATTACKS[number % len(ATTACKS)]
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(start)
                while True:
                    writer.write(piece)
                    await writer.drain()
                    num_sent[number % len(ATTACKS)] += len(piece)
                    await asyncio.sleep(pause)
            finally:
                writer.transport.abort()
        await asyncio.sleep(1)


async def tokens(port: int) -> AsyncIterator[float]:
    """When each piece of a stream comes; when it ends, of another one."""
    body = {"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("/v1/completions", body))
        status, _ = await read_head(reader)
        assert status == 200
        async for line in reader:
            if line.startswith(b"data: {"):
                yield time.monotonic()
            elif line.startswith(b"data: [DONE]"):
                break
        writer.close()
        yield -1.0


async def gaps(port: int, seconds: float) -> list[float]:
    """Seconds between the pieces of streams, ascending, for that time."""
    found: list[float] = []
    last = -1.0
    end = time.monotonic() + seconds
    async for now in tokens(port):
        if last > 0 and now > 0:
            found.append(now - last)
        last = now
        if time.monotonic() > end:
            break
    return sorted(found)


def memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


async def flood(port: int, num_sent: Counter[int]) -> None:
    await asyncio.gather(*(attack(port, number, num_sent) for number in range(NUM_CONNECTIONS)))


def test_a_flood_takes_little_memory_and_no_stream(serve_app: Any) -> None:
    """The clients are in the same process: their memory counts too, so bodies are smaller, and no gap is measured."""
    served = serve_app(max_request_bytes=4 << 20)

    async def run() -> list[float]:
        await gaps(served.port, 0.2)
        before = memory(os.getpid())
        num_sent, found = Counter[int](), list[float]()
        attacks = asyncio.create_task(flood(served.port, num_sent))
        began = time.process_time()
        while (len(found) <= 100 or num_sent.total() <= ENOUGH_SENT) and time.process_time() - began < 10:
            found += await gaps(served.port, 0.5)
        growth = memory(os.getpid()) - before
        attacks.cancel()
        await asyncio.gather(attacks, return_exceptions=True)
        assert num_sent.keys() == set(range(len(ATTACKS)))
        assert num_sent.total() > ENOUGH_SENT
        assert growth < MAX_GROWTH
        return found

    assert len(asyncio.run(run())) > 100
    assert served.client.get("/health").status_code == 200


def run_flood(port: int) -> None:
    """In a process of its own: the one that reads the stream must not be late by itself.

    It has a lower priority, as clients on the server's own cores would otherwise take the time that the stream needs;
    what is measured is the work that they make for the server.
    """
    os.nice(10)
    asyncio.run(flood(port, Counter()))


def main() -> None:
    port, pid = int(sys.argv[1]), int(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
    alone = asyncio.run(gaps(port, min(20.0, seconds)))
    before = peak = memory(pid)
    flooding = multiprocessing.get_context("spawn").Process(target=run_flood, args=(port,), daemon=True)
    flooding.start()
    ended = False

    def watch() -> None:
        nonlocal peak
        while not ended:
            peak = max(peak, memory(pid))
            time.sleep(0.02)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    beside = asyncio.run(gaps(port, seconds))
    ended = True
    flooding.terminate()
    result = {"longest_gap_alone": alone[-1], "longest_gap_beside": beside[-1], "median_alone": alone[len(alone) // 2]}
    result |= {"median_beside": beside[len(beside) // 2], "MiB_before": before / 2**20, "MiB_peak": peak / 2**20}
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
