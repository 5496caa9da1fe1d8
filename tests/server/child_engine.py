"""``AsyncEngine`` over a child process that has no model (see ``fake_engine.py``), and streams from it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from octavo.config import ModelSettings, ServeConfig
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server_settings import ServerSettings
from octavo.types import Output, Request
from octavo_server.engines.async_engine import AsyncEngine
from tests.server.fake_engine import expected
from tests.server.forked_engine import forked

ROOT = Path(__file__).parents[2]
SLOW = {"step_seconds": 0.003}


class Recorder:
    """A listener that keeps everything, and complains when something follows the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.error: RequestError | None = None
        self.done = asyncio.Event()
        self.weights: list[tuple[str, int]] = []

    def on_output(self, output: Output) -> None:
        assert not self.done.is_set()
        self.tokens += output.tokens
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.done.set()

    def on_weights(self, version: str) -> None:
        self.weights.append((version, len(self.tokens)))

    def on_error(self, error: RequestError) -> None:
        assert not self.done.is_set()
        self.error = error
        self.done.set()


def make_config(timeout: float = 30.0, **knobs: Any) -> ServeConfig:
    server = ServerSettings(engine_timeout=timeout)
    return ServeConfig(model=ModelSettings(model=json.dumps(knobs)), server=server)


def command() -> list[str]:
    """Runs an engine process in a new interpreter."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    code += "from octavo_server.engines import engine_process; from tests.server import fake_engine; "
    return [sys.executable, "-c", code + "engine_process.main(build=fake_engine.build)"]


def make_engine(timeout: float = 30.0, argv: list[str] | None = None, **knobs: Any) -> AsyncEngine:
    return AsyncEngine(make_config(timeout, **knobs), argv or forked())


@asynccontextmanager
async def running(timeout: float = 30.0, argv: list[str] | None = None, **knobs: Any) -> AsyncIterator[AsyncEngine]:
    """An engine whose processes are forked, unless ``argv`` is another command."""
    engine = make_engine(timeout, argv, **knobs)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(0)
        assert engine.num_live == 0
        assert engine.pid is None or not os.path.exists(f"/proc/{engine.pid}")


def send(engine: AsyncEngine, mark: int = 1, max_tokens: int = 40) -> tuple[Request, Recorder]:
    request_id = engine.next_id()
    request = Request(request_id, [mark, request_id], SamplingParams(), max_tokens)
    recorder = Recorder()
    engine.add(request, recorder)
    return request, recorder


async def begin(engine: AsyncEngine, count: int, num_tokens: int, **more: Any) -> list[tuple[Request, Recorder]]:
    """Streams that have so many tokens, and get no more before the engine's pace is set again or its process replaced:
    however late this process is, they have not ended."""
    engine.set_pace(0)
    streams = [send(engine, **more) for _ in range(count)]
    await advance(engine, streams, num_tokens)
    return streams


async def advance(engine: AsyncEngine, streams: list[tuple[Request, Recorder]], num_tokens: int) -> None:
    """So many further tokens for each of the streams of an engine that holds."""
    wanted = [len(recorder.tokens) + num_tokens for _, recorder in streams]
    engine.set_pace(num_tokens)
    await until(lambda: [len(recorder.tokens) for _, recorder in streams] == wanted)


async def finish(streams: list[tuple[Request, Recorder]], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        for _, recorder in streams:
            await recorder.done.wait()


def assert_right(streams: list[tuple[Request, Recorder]]) -> None:
    for request, recorder in streams:
        assert recorder.error is None
        assert recorder.tokens == expected(request)
        assert recorder.finish_reason == "length"


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def kill(engine: AsyncEngine, how: int = signal.SIGKILL) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, how)
