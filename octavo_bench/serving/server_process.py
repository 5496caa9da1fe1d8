"""A server under measurement: started in a process group of its own, waited for, and stopped for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import httpx

from octavo.errors import ConfigError

READY_SECONDS = 300.0
STOP_SECONDS = 60.0
LOG_TAIL = 2000
OCTAVO = (sys.executable, "-m", "octavo", "serve")


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server(NamedTuple):
    """How one engine's server is started: the flags of an address are added."""

    command: tuple[str, ...]
    ready_path: str = "/ready"
    env: Mapping[str, str] | None = None

    @classmethod
    def of_vllm(cls, python: str, arguments: Sequence[str], env: Mapping[str, str]) -> Server:
        """vLLM's, by an interpreter that has it."""
        return cls((python, "-m", "vllm.entrypoints.openai.api_server", "--model", *arguments), "/health", env)

    def start(self, *more: str, log: Path | None = None) -> ServerProcess:
        """Start it at a free port of this host, with ``more`` arguments."""
        port = free_port()
        command = [*self.command, *more, "--host", "127.0.0.1", "--port", str(port)]
        return ServerProcess(command, f"http://127.0.0.1:{port}", self.ready_path, log, self.env)


def serve_octavo(*arguments: str) -> ServerProcess:
    """Start ``octavo serve`` at a free port of this host."""
    return Server((*OCTAVO, *arguments)).start()


class ServerProcess:
    """A server at ``url``. Leaving the context ends it and every process of its group.

    ``ready_path`` answers 200 once requests are served, and not before. Without ``log``, what the server says on
    standard output is dropped and its errors are shown.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        ready_path: str = "/ready",
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.command = command
        self._ready = url + ready_path
        self._log = log
        self._start = time.perf_counter()
        with contextlib.ExitStack() as files:
            out = files.enter_context(log.open("wb")) if log else subprocess.DEVNULL
            err = subprocess.STDOUT if log else None
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_ready(self, seconds: float = READY_SECONDS) -> float:
        """Wait until it is ready; returns the seconds since its start. Raises ``ConfigError`` with its last words."""
        with httpx.Client(timeout=5) as client:  # making one for each question would keep a core busy
            while not self._is_ready(client):
                waited = time.perf_counter() - self._start
                if (code := self.process.poll()) is not None:
                    raise ConfigError(f"the server ended with {code} before it was ready{self._said()}")
                if waited > seconds:
                    raise ConfigError(f"the server was not ready after {waited:.0f} s{self._said()}")
                time.sleep(0.01)
        return time.perf_counter() - self._start

    def _is_ready(self, client: httpx.Client) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return client.get(self._ready).status_code == 200
        return False

    def _said(self) -> str:
        if self._log is None:
            return ""
        return "; its log ends with:\n" + self._log.read_text(errors="replace")[-LOG_TAIL:]

    def stop(self) -> None:
        """End it with SIGTERM, and what is left of its group with SIGKILL."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
