"""Engines in place of those in new processes, which would import for 0.3 s of processor time, with torch for 2 s.

They are forked from the process of the tests, or run in a thread of it. That a process can be started is for all
tests of `octavo serve`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from octavo.config import EngineConfig
from octavo_server.engines import engine_link, engine_process, wire

FORKED = "forked"
THREADED = ["threaded"]
"""In place of a command: a thread over the real engine of the settings, which nothing can kill."""


def forked(module: str = "fake_engine") -> list[str]:
    """In place of a command: a process over the engine that a module of this folder builds."""
    return [FORKED, module]


class ForkedProcess:
    """What ``EngineLink`` and ``RankProcesses`` need of ``subprocess.Popen``."""

    def __init__(self, main: Callable[[], NoReturn], arguments: Sequence[str], fds: Sequence[int]) -> None:
        """Run ``main`` with these arguments and no other files."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(main, arguments, fds)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float = 10.0) -> int:
        """The exit status."""
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.002)
        return status


def _run(main: Callable[[], NoReturn], arguments: Sequence[str], fds: Sequence[int]) -> NoReturn:
    """Be as a process that was started anew: without files and signals of this one."""
    try:
        signal.set_wakeup_fd(-1)
        for first, last in itertools.pairwise([2, *sorted(fds), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(first + 1, last)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["forked", *arguments]
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def fork_engine(module: str, fd: str, environment: Mapping[str, str]) -> ForkedProcess:
    """A process over the engine that a module of this folder builds, which talks through this file."""
    build = importlib.import_module(f"tests.server.{module}").build

    def main() -> NoReturn:
        os.setpgid(0, 0)
        os.environ.update(environment)
        engine_process.main(build)

    process = ForkedProcess(main, [fd], [int(fd)])
    os.setpgid(process.pid, process.pid)  # whoever is first: it may be stopped before it has done so
    return process


class ThreadedEngine:
    """What ``EngineLink`` needs of ``subprocess.Popen``."""

    def __init__(self, fd: int) -> None:
        self.pid = os.getpid()
        self._socket = socket.socket(fileno=os.dup(fd))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from octavo.build.build_engine import build_engine

        channel = engine_process.EngineChannel(self._socket)
        with self._socket, contextlib.suppress(engine_process.FrontGone):
            start = channel.receive(wait=True)[0]
            assert isinstance(start, wire.Start)
            try:
                engine, info = build_engine(EngineConfig.from_flat(start.config))
            except Exception as error:
                channel.send(wire.BuildFailed(start.generation, type(error).__name__, str(error)))
                return
            with contextlib.closing(engine):
                channel.send(wire.Ready(start.generation, info))
                engine_process.EngineLoop(engine, channel, start.generation).run()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        raise AssertionError("the engine does not end by itself")


def _start(argv: Sequence[str], **options: Any) -> Any:
    if argv[0] == FORKED:
        return fork_engine(argv[1], argv[2], options["env"])
    if argv[0] == THREADED[0]:
        return ThreadedEngine(int(argv[1]))
    return subprocess.Popen(argv, **options)


setattr(engine_link, "subprocess", SimpleNamespace(Popen=_start))  # noqa: B010
