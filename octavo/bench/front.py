"""What serving costs besides the model: processor time of the front process per streamed token.

A front process with the real HTTP server, admission, journal, detokenizer and streams runs in front of a paced
engine. Streams are read over loopback connections; the front process's own user and system time is divided by
the tokens it delivered.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.server_process import ServerProcess, free_port

READY_SECONDS = 60.0


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far (Linux: /proc/PID/stat, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read_stream(port: int, tokens: int) -> int:
    """Ask for ``tokens`` tokens and read the whole answer; returns the number of frames."""
    body = json.dumps(
        {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    frames = 0
    while data := await reader.read(1 << 16):
        frames += data.count(b"data: ")
    writer.close()
    return frames


async def _read_all(port: int, streams: int, tokens: int) -> int:
    return sum(await asyncio.gather(*(read_stream(port, tokens) for _ in range(streams))))


def measure(sizes: Sequence[int], tokens: int, step_ms: float, model: Path) -> list[dict[str, Any]]:
    """One row for each number of streams: microseconds of the front process per token."""
    rows = []
    port = free_port()
    command = [sys.executable, "-m", "octavo.bench.front_process", str(port), str(step_ms), str(model)]
    with ServerProcess(command, f"http://127.0.0.1:{port}") as server:
        pid = server.process.pid
        server.wait_ready(READY_SECONDS)
        asyncio.run(_read_all(port, 4, 20))
        for streams in sizes:
            before, start = cpu_seconds(pid), time.perf_counter()
            frames = asyncio.run(_read_all(port, streams, tokens))
            used, seconds = cpu_seconds(pid) - before, time.perf_counter() - start
            total = streams * tokens
            rows.append(
                {
                    "streams": streams,
                    "tokens": total,
                    "frames_per_token": round(frames / total, 3),
                    "tokens_per_second": round(total / seconds, 1),
                    "front_cpu_us_per_token": round(used / total * 1e6, 2),
                }
            )
    return rows
