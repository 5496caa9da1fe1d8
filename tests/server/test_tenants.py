"""A hundred API keys, one of which floods the server with every kind of request, and what becomes of the others.

``python -m tests.server.test_tenants [SECONDS] [KIND ...] [NAME=VALUE ...] [--output FILE]`` starts a server whose
steps take 20 ms, with these settings, measures the others' time to the first token without a flood and next to each
kind of one, and prints the percentiles and what was refused. FILE is a record, and keeps the rows of other kinds. The
flood's client runs with ``os.nice(10)``, as it is on the server's own cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import httpx
import psutil
import pytest

from octavo.config import EngineConfig, ServeConfig
from octavo.types import EngineInfo
from octavo_bench.records.report import keep
from octavo_bench.serving.paced_engine import PacedRunner
from octavo_fleet.backends.toy import ToyEngine
from octavo_fleet.backends.toy import build as build_toy
from octavo_server.engines.engine_process import main as serve_engine
from octavo_server.front import serving
from tests.server.durable.test_durable import PacedEngine
from tests.server.raw import read_head
from tests.server.test_keys import bearer, key_file, line

pytestmark = pytest.mark.slow

NUM_OTHERS = 99
PERIOD = 1.5
"""Seconds between the requests of each of them."""
STEP_SECONDS = 0.02
FLOODER = "flooder"


class Answer(NamedTuple):
    """Of a request of the others."""

    status: int
    ttft: float


async def send(port: int, key: str, path: str, body: dict[str, Any], headers: str = "") -> asyncio.StreamReader:
    """Send a request; its connection closes when the reader is forgotten."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {key}\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    await writer.drain()
    reader.__dict__["writer"] = writer
    return reader


def close(reader: asyncio.StreamReader) -> None:
    reader.__dict__["writer"].transport.abort()


async def ask(port: int, key: str) -> Answer:
    """A short stream."""
    started = time.monotonic()
    body = {"prompt": "Once upon a time", "max_tokens": 4, "stream": True, "ignore_eos": True}
    reader = await send(port, key, "/v1/completions", body)
    status, _ = await read_head(reader)
    ttft = time.monotonic() - started
    await reader.read()
    close(reader)
    return Answer(status, ttft)


async def others(port: int, rounds: int, num: int = NUM_OTHERS, period: float = PERIOD) -> list[Answer]:
    """The answers of ``num`` keys that each send ``rounds`` requests, one in ``period`` seconds at most."""
    answers = list[Answer]()

    async def one(number: int) -> None:
        await asyncio.sleep(period * number / num)
        for _ in range(rounds):
            began = time.monotonic()
            answers.append(await ask(port, f"key{number}"))
            await asyncio.sleep(max(0.0, began + period - time.monotonic()))

    await asyncio.gather(*(one(number) for number in range(num)))
    return answers


# --- the flood ---

Kind = Callable[[int, int], Awaitable[int]]
"""Sends one request to a port, with a number, and returns the status."""


async def status_of(reader: asyncio.StreamReader) -> int:
    try:
        return (await read_head(reader))[0]
    finally:
        close(reader)


async def plain(port: int, number: int) -> int:
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
    return await status_of(await send(port, FLOODER, "/v1/completions", body))


async def streamed(port: int, number: int) -> int:
    messages = [{"role": "user", "content": f"Hi {number}"}]
    body = {"messages": messages, "max_tokens": 300, "stream": True, "ignore_eos": True}
    reader = await send(port, FLOODER, "/v1/chat/completions", body)
    status, _ = await read_head(reader)
    await reader.read()
    close(reader)
    return status


async def keyed(port: int, number: int) -> int:
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
    reader = await send(port, FLOODER, "/v1/completions", body, f"Idempotency-Key: {random.random()}\r\n")
    await asyncio.sleep(0.05)
    close(reader)  # it goes on
    return 0


async def grammar(port: int, number: int) -> int:
    body = {"prompt": "x", "max_tokens": 4, "guided_regex": f"y{random.random()}a{{100}}"}
    return await status_of(await send(port, FLOODER, "/v1/completions", body))


async def post_file(port: int, content: bytes) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as client:
        data, headers = {"purpose": "batch"}, bearer(FLOODER)
        return await client.post("/v1/files", files={"file": ("a", content)}, data=data, headers=headers)


async def files(port: int, number: int) -> int:
    return (await post_file(port, b"x" * (4 << 20))).status_code if number < 20 else 0


async def batches(port: int, number: int) -> int:
    if number >= 40:
        return 0
    texts = [
        json.dumps(
            {
                "custom_id": str(line),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "x", "max_tokens": 50},
            }
        )
        for line in range(200)
    ]
    sent = await post_file(port, "\n".join(texts).encode())
    if sent.status_code != 200:
        return sent.status_code
    body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return await status_of(await send(port, FLOODER, "/v1/batches", body))


async def background(port: int, number: int) -> int:
    body = {"input": "Hi", "background": True, "max_output_tokens": 300}
    return await status_of(await send(port, FLOODER, "/v1/responses", body))


async def tokenise(port: int, number: int) -> int:
    return await status_of(await send(port, FLOODER, "/tokenize", {"prompt": "some words " * 300}))


KINDS: tuple[Kind, ...] = (plain, streamed, keyed, grammar, files, batches, background, tokenise)


async def flood(port: int, kinds: tuple[Kind, ...], seen: Counter[tuple[str, int]], num: int = 400) -> None:
    """Send requests of all ``kinds`` on ``num`` connections, until cancelled; ``seen`` counts what became of them."""

    async def one(number: int) -> None:
        for turn in itertools.count(number):
            kind = kinds[turn % len(kinds)]
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, httpx.HTTPError):
                status = await kind(port, number)
                seen[kind.__name__, status] += 1
            await asyncio.sleep(0.1)

    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(one(number) for number in range(num)))


def keys_for(folder: Path) -> str:
    lines = [line(f"tenant{number}", f"key{number}") for number in range(NUM_OTHERS)]
    return key_file(folder, *lines, line(FLOODER, FLOODER))


def test_no_flood_of_one_key_has_another_refused(serve_app: Any, tmp_path: Path) -> None:
    """The clients are in the same process, so no time is measured: the flood lasts until each of its kinds was answered
    and one of its requests was refused."""
    num_others = 33
    engine = PacedEngine(max_num_seqs=16)
    served = serve_app(
        engine, api_key_file=keys_for(tmp_path), journal=str(tmp_path / "journal"), max_num_queued_reqs=16
    )
    flooded: Counter[tuple[str, int]] = Counter()

    def was_flooded() -> bool:
        return {name for name, _ in flooded} == {kind.__name__ for kind in KINDS} and 429 in {s for _, s in flooded}

    async def run() -> list[Answer]:
        flooding = asyncio.create_task(flood(served.port, KINDS, flooded, 64))
        while not engine.live_owners[FLOODER] >= 16:
            await asyncio.sleep(0.01)
        answers = await others(served.port, 1, num_others, period=1)
        while not was_flooded():
            await asyncio.sleep(0.01)
        flooding.cancel()
        await flooding
        return answers

    answers = asyncio.run(run())
    assert Counter(answer.status for answer in answers) == {200: num_others}


# --- by hand ---


def build(config: EngineConfig) -> tuple[ToyEngine, EngineInfo]:
    """The toy engine with the policy of ``config``, and steps of ``STEP_SECONDS``."""
    engine, info = build_toy(config)
    return ToyEngine(engine.scheduler, PacedRunner(STEP_SECONDS)), info


def run_engine() -> NoReturn:
    serve_engine(build)  # type: ignore[arg-type]


def run_server(port: str, folder: str, *settings: str) -> int:
    values: dict[str, Any] = dict(setting.split("=") for setting in settings)
    values |= {"backend": "toy", "port": int(port), "log_level": "error", "access_log": False}
    config = ServeConfig.from_flat(values | {"api_key_file": keys_for(Path(folder)), "journal": f"{folder}/journal"})
    return serving.run(config, engine_argv=[sys.executable, "-m", "tests.server.test_tenants", "engine"])


def run_flood(port: int, names: list[str], seconds: float) -> None:
    """In a process of its own."""
    os.nice(10)

    async def run() -> None:
        seen: Counter[tuple[str, int]] = Counter()
        flooding = asyncio.create_task(flood(port, tuple(kind for kind in KINDS if kind.__name__ in names), seen))
        await asyncio.sleep(seconds)
        flooding.cancel()
        await flooding
        print("   ", dict(sorted((" ".join(map(str, key)), count) for key, count in seen.items())))

    asyncio.run(run())


def figures(answers: list[Answer]) -> dict[str, Any]:
    times = sorted(answer.ttft * 1e3 for answer in answers if answer.status == 200)
    p99 = times[int(0.99 * (len(times) - 1))]
    refused = Counter(answer.status for answer in answers if answer.status != 200)
    ttft = {"ttft_p50_ms": round(statistics.median(times), 1), "ttft_p99_ms": round(p99, 1)}
    return {**ttft, "answers": len(times), "refused": sum(refused.values())}


def busy_seconds(server: int) -> dict[str, float]:
    """Processor time so far of the server's processes by what they are."""
    seconds = Counter[str]()
    for process in [psutil.Process(server), *psutil.Process(server).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            used, words = process.cpu_times(), " ".join(process.cmdline())
            kind = "front" if process.pid == server else "engine" if "test_tenants engine" in words else "children"
            seconds[kind] += used.user + used.system
            seconds["children"] += used.children_user + used.children_system
    return seconds


def keep_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the record, with the rows of other kinds that the file holds."""
    earlier = json.loads(path.read_text())["result"]["rows"] if path.is_file() else []
    new = {row["flood"] for row in rows}
    keep("tenants", {"rows": [row for row in earlier if row["flood"] not in new] + rows}, path)


def main(seconds: float, names: list[str], settings: list[str], output: Path | None) -> None:
    rounds = math.ceil(seconds / PERIOD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.server.test_tenants", "serve", str(port), folder, *settings]
        server = subprocess.Popen(command)
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                        break
                time.sleep(0.2)
            asyncio.run(others(port, 2))
            alone = figures(asyncio.run(others(port, rounds)))
            rows: list[dict[str, Any]] = [{"flood": "none", "seconds": seconds, **alone}]
            print(f"{'none':12}{alone}", flush=True)
            for name in names:
                before = busy_seconds(server.pid)
                kinds = [kind.__name__ for kind in KINDS if name in (kind.__name__, "all")]
                spawn = multiprocessing.get_context("spawn")
                flooding = spawn.Process(target=run_flood, args=(port, kinds, seconds + 2))
                flooding.start()
                time.sleep(2)
                found = figures(asyncio.run(others(port, rounds)))
                rows.append({"flood": name, "seconds": seconds, **found})
                print(f"{name:12}{found}  x {found['ttft_p99_ms'] / alone['ttft_p99_ms']:.2f}", flush=True)
                flooding.join()
                used = {kind: round(now - before[kind], 1) for kind, now in busy_seconds(server.pid).items()}
                print("    processor seconds of", used, flush=True)
            if output is not None:
                keep_rows(rows, output)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        run_engine()
    elif sys.argv[1:2] == ["serve"]:
        sys.exit(run_server(*sys.argv[2:]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("seconds", nargs="?", type=float, default=60.0)
        parser.add_argument("rest", nargs="*")
        parser.add_argument("--output", type=Path)
        given = parser.parse_args()
        asked = [word for word in given.rest if "=" not in word] or [*[kind.__name__ for kind in KINDS], "all"]
        main(given.seconds, asked, [word for word in given.rest if "=" in word], given.output)
