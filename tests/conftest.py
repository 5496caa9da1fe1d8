"""Fixtures that many tests share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

import tests.environment  # before anything else imports torch
from tests.tiers import leave_to_nightly, tier_of

OTHER_TIERS = re.compile(r"^pytestmark = .*\b(slow|model|nightly|timing)\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Ask for Triton's interpreter before anything imports triton; the quick tests need none of torch."""
    if config.option.markexpr != "unit":
        importlib.import_module("tests.triton_interpreter")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without a test of the tier ``unit`` where that is asked for."""
    if config.option.markexpr == "unit" and collection_path.suffix == ".py":
        return bool(OTHER_TIERS.search(collection_path.read_text())) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Next to nothing of what is imported is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_nightly(items)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        item.add_marker(tier_of(item.path.relative_to(tests.environment.ROOT / "tests"), marks))


# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("octavo", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("octavo")


SLOW_SEARCH = 0.02


class Searches:
    """Searches of everything for garbage. Each build of an engine makes one, and after transformers was imported it
    takes a tenth of a second."""

    began = 0.0
    are_slow = True

    @classmethod
    def note(cls, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            cls.began = time.thread_time()
        elif info["generation"] == 2 and time.thread_time() - cls.began > SLOW_SEARCH:
            cls.are_slow = True


gc.callbacks.append(Searches.note)


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new_is_searched() -> None:
    """Leave what came before out of all later searches for garbage: an engine begins with one."""
    gc.collect()
    gc.freeze()
    Searches.are_slow = False


@pytest.fixture(autouse=True)
def searches_are_quick(only_what_is_new_is_searched: None) -> None:
    """So is what a test has imported, for those after it."""
    if Searches.are_slow:
        gc.collect()
        gc.freeze()
        Searches.are_slow = False


@pytest.fixture(autouse=True)
def same_random_numbers(request: pytest.FixtureRequest) -> None:
    """A test that draws numbers draws the same ones in every run, alone or among others."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """Commands set what is logged in this process; the next test begins with what was."""
    logger = logging.getLogger("octavo")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The real GGUF file of the default model, fetched once into the user's cache folder."""
    from octavo.weights.default_model import fetch_default_model

    return fetch_default_model(progress=False)


@pytest.fixture(scope="module")
def all_cores() -> Iterator[None]:
    """Engines, and servers that are started, have as many threads as they have by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(tests.environment.THREADS, raising=False)
        yield


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def socket_folder(short_folder: Path) -> Path:
    """A new folder with a short path, wherever temporary files are: the path of a socket can have 107 bytes."""
    return Path(tempfile.mkdtemp(dir=short_folder))


@dataclass
class Server:
    """A running `octavo serve`, with what it printed.

    It speaks plain HTTP. Reading all certificates for each request, to verify nothing, would keep a core busy.
    """

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, headers=self.headers, verify=False, **kwargs)

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300, headers=self.headers, verify=False, **kwargs)

    def engine_pid(self) -> int:
        return int(self.get("/stats").json()["engine_pid"])

    def stop(self) -> int:
        """Ask it to drain; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start_server(*args: str, env: dict[str, str] | None = None, timeout: float = 240, key: str = "") -> Server:
    """Start `octavo serve --port 0 ARGS` and wait until it is ready; with ``key`` it asks for one."""
    args = (*args, "--api-key", key) if key else args
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "serve", "--port", "0", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    server = Server(process, headers={"Authorization": f"Bearer {key}"} if key else {})
    assert process.stdout is not None

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            if not server.url and (found := re.search(r"http://[\w.]+:\d+", line)):
                server.url = found.group()

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if server.url:
            with contextlib.suppress(httpx.HTTPError):
                if server.get("/ready").status_code == 200:
                    return server
        time.sleep(0.05)
    process.kill()
    pytest.fail("the server did not become ready:\n" + "".join(server.lines[-40:]))


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers that are stopped when the test ends."""
    servers: list[Server] = []

    def start(*args: str, **kwargs: Any) -> Server:
        servers.append(start_server(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
