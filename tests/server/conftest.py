"""A server in a thread of the test process, around an engine whose answers are known."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvloop
from starlette.applications import Starlette

from octavo.config import ServeConfig
from octavo.grammar import trial_queue
from octavo.images import preparer
from octavo.server_settings import ServerSettings
from octavo.text import chat_template
from octavo.text.tokenizer import Tokenizer
from octavo_server.app import create_app
from octavo_server.http.server import HTTPServer
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer
from tests.server.kept_processes import KeptProcess

TICK_SECONDS = 0.1
"""Time between looks for connections that are late."""


HERMES = (
    "{% if tools %}<tool_call>arguments</tool_call> {{ tools | tojson }}{% endif %}<think></think>"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n{% endfor %}"
    "{% if enable_thinking %}think{% endif %}"
)
CALLS = '<think>Two and two.</think>I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def tokens_of(text: str) -> list[int]:
    return [*text.encode(), IM_END]


class PromptServer(HTTPServer):
    """One without uvicorn's pauses: it ends as soon as ``end`` is called and its connections are closed."""

    async def main_loop(self) -> None:
        self._end = asyncio.Event()
        while not self._end.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), TICK_SECONDS)

    def end(self) -> None:
        self._end.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.001)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


class AppServer:
    """A running application, with clients for it."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        self.app = app
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = PromptServer(app, settings)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server could not start"
            threading.Event().wait(0.005)
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=False)  # plain HTTP: no certificates to read

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])

    def call(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` on the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, **body})

    def stop(self) -> None:
        self.client.close()
        self.loop.call_soon_threadsafe(self._server.end)
        self._thread.join(30)
        self.app.state.services.close()


class Served(AppServer):
    """An application in front of an engine whose answers are known."""

    def __init__(self, engine: InProcessEngine, tokenizer: Tokenizer | None, settings: dict[str, Any]) -> None:
        config = ServeConfig.from_flat({"model": "test", **settings})
        self.engine = engine
        super().__init__(create_app(config, engine, tokenizer), config.server)


def execute(served: Served, sql: str) -> Any:
    """Run a statement on the database of what is kept; returns the first number of its first row."""
    store = served.app.state.services.store

    def run() -> Any:
        row = store._database.execute(sql).fetchone()
        return row and row[0]

    return store._thread.submit(run).result()


def fill(served: Served) -> None:
    """Let the database have no more pages than it has, none of them free, as on a full disk."""
    execute(served, "VACUUM")
    execute(served, f"PRAGMA max_page_count = {execute(served, 'PRAGMA page_count')}")


def make_room(served: Served) -> None:
    """End what ``fill`` did."""
    execute(served, "PRAGMA max_page_count = 1000000")


@pytest.fixture(autouse=True, scope="module")
def processes_are_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (chat_template, trial_queue, preparer):
            patch.setattr(module, "ChildProcess", KeptProcess)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def serve_app(tokenizer: Tokenizer) -> Iterator[Callable[..., Served]]:
    """Start servers that are stopped when the test ends. Keyword arguments are settings."""
    running: list[Served] = []

    def start(
        engine: InProcessEngine | None = None, *, tokenizer: Tokenizer | None = tokenizer, **settings: Any
    ) -> Served:
        running.append(Served(engine or InProcessEngine(), tokenizer, settings))
        return running[-1]

    yield start
    for served in running:
        served.stop()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server with default settings for the tests of a module that leave no trace."""
    served = Served(InProcessEngine(), byte_tokenizer(), {})
    yield served
    served.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One with default settings, for a module's tests."""
    served = Served(InProcessEngine(), byte_tokenizer(), {})
    yield served
    served.stop()


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    """A server whose model thinks, then calls a function."""
    served = Served(InProcessEngine(lambda request: tokens_of(CALLS)), byte_tokenizer(HERMES), {})
    yield served
    served.stop()
