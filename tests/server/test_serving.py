"""The serving process: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo.server_settings import ServerSettings
from octavo_server.front import serving
from octavo_server.front.serving import _Serving
from tests.server.raw import connect, read_chunk, read_head
from tests.tiers import nightly_after

ROOT = Path(__file__).parents[2]


class Process:
    """A serving process and where it listens."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        arguments = [f"{name}={value}" for name, value in settings.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_script", str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        assert self.process.stderr is not None
        pytest.fail("".join(self.lines) + self.process.stderr.read())

    def wait_ready(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.read_until("http://"))
        assert found is not None
        self.port = int(found.group(1))
        return found.group()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(**settings: Any) -> Process:
        folder = tmp_path / "tiny-model"
        folder.mkdir(exist_ok=True)
        processes.append(Process(folder, settings))
        return processes[-1]

    yield start
    for one in processes:
        one.process.kill()
        one.process.communicate()


@pytest.mark.slow
def test_it_prints_a_command_that_works(start: Callable[..., Process]) -> None:
    process = start()
    url = process.wait_ready()
    assert process.read_until("browser").split()[-1] == f"{url}/"
    words = shlex.split(process.read_until("curl").partition("program:")[2])
    assert words[0] == "curl"
    assert words[1] == url + "/v1/completions", "this model has no chat"
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "tiny-model"
    answer = httpx.post(words[1], json=body, timeout=10)
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["token_ids"]) == body["max_tokens"]


@pytest.mark.slow
def test_a_start_says_what_it_spent_its_time_on(start: Callable[..., Process]) -> None:
    process = start(log_level="info")
    process.wait_ready()
    process.process.terminate()
    errors = process.process.communicate(timeout=20)[1]
    for phase in ("imports of the front process", "tokenizer and chat template"):
        assert re.search(rf"octavo\.start: {phase}: \d+\.\d\d s", errors)


@pytest.mark.slow
def test_the_log_is_json_if_asked_for(start: Callable[..., Process]) -> None:
    process = start(log_level="info", log_format="json")
    assert httpx.get(process.wait_ready() + "/v1/models").status_code == 200
    process.process.terminate()
    entries = [json.loads(line) for line in process.process.communicate(timeout=20)[1].splitlines()]
    assert [entry["path"] for entry in entries if entry["logger"] == "octavo.access"] == ["/v1/models"]


async def stream(port: int, max_tokens: int) -> tuple[Any, Any]:
    """A stream that has begun."""
    body = {"prompt": [1, 2], "max_tokens": max_tokens, "stream": True}
    reader, writer = await connect(port, "/v1/completions", body)
    assert (await read_head(reader))[0] == 200
    assert await read_chunk(reader)
    return reader, writer


async def rest(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while piece := await read_chunk(reader):
        data += piece
    return data


@pytest.mark.slow
@pytest.mark.parametrize("number", nightly_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_drains(start: Callable[..., Process], number: signal.Signals) -> None:
    process = start()
    url = process.wait_ready()

    async def run() -> bytes:
        reader, _ = await stream(process.port, 40)
        process.process.send_signal(number)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while (await client.get("/ready")).status_code != 503:
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 200
            refused = await client.post("/v1/completions", json={"prompt": [1]})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
        return await rest(reader)

    data = asyncio.run(run())
    assert data.count(b'"token_ids"') >= 35
    assert b'"finish_reason":"length"' in data
    assert data.endswith(b"data: [DONE]\n\n")
    assert process.process.wait(30) == 0


@pytest.mark.slow
def test_what_is_not_done_in_time_ends_with_an_error_event(start: Callable[..., Process]) -> None:
    process = start(shutdown_timeout=0.3)
    process.wait_ready()

    async def run() -> bytes:
        reader, _ = await stream(process.port, 400)
        process.process.send_signal(signal.SIGTERM)
        return await rest(reader)

    data = asyncio.run(run())
    error, done, _ = data.split(b"\n\n")[-3:]
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
    assert done == b"data: [DONE]"
    assert process.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("pause", nightly_after(1, [0.0, 0.2]))
def test_more_signals_do_not_wait(start: Callable[..., Process], pause: float) -> None:
    process = start(shutdown_timeout=60)
    process.wait_ready()

    async def run() -> None:
        _, writer = await stream(process.port, 400)
        process.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(pause)
        assert process.process.poll() is None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            process.process.send_signal(number)
        assert await asyncio.to_thread(process.process.wait, 30) == 0
        writer.close()

    asyncio.run(run())
    assert process.process.stderr is not None
    assert "Traceback" not in process.process.stderr.read()


@pytest.mark.parametrize("between", [0, 1])
def test_signals_that_come_together_still_stop_the_engine(between: int) -> None:
    """Before the first one had any effect, and while the engine stops at once."""
    stops: list[float] = []

    class Engine:
        num_live = 1

        async def stop(self, timeout: float) -> None:
            stops.append(timeout)
            await asyncio.sleep(60 if timeout else 0.05)

    async def run() -> int:
        server = SimpleNamespace(should_exit=False, force_exit=False)

        async def serve(server: Any) -> None:
            process._on_signal()
            for _ in range(2):
                for _ in range(between):
                    await asyncio.sleep(0.01)
                process._on_signal()

        front = SimpleNamespace(engine=Engine(), close=lambda: None)
        process = _Serving(ServerSettings(), socket.socket(), front)  # type: ignore[arg-type]
        process._start = AsyncMock(return_value=server)  # type: ignore[method-assign]
        process._serve = serve  # type: ignore[assignment,method-assign]
        with process.listener:
            return await asyncio.wait_for(process.run(), 30)

    assert asyncio.run(run()) == 0
    assert stops[-1] == 0


@pytest.mark.slow
def test_a_signal_while_starting(start: Callable[..., Process]) -> None:
    process = start()
    process.read_until("starting")
    process.process.send_signal(signal.SIGINT)
    assert process.process.wait(30) == 0


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            serving.run(ServeConfig.from_flat({"model": "/does/not/exist", "port": port}))
