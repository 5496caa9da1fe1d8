"""Engine processes that are forked from the one of the tests, which has imported all that they need.

A new interpreter imports for 0.3 s of processor time. That one can be started is for ``test_engine_process.py`` and
all tests of `octavo serve`.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from octavo_server.engines import engine_link, engine_process

FORKED = "forked"


def forked(module: str = "fake_engine") -> list[str]:
    """In place of a command: a process over the engine that a module of this folder builds."""
    return [FORKED, module]


class ForkedProcess:
    """What ``EngineLink`` needs of ``subprocess.Popen``."""

    def __init__(self, module: str, fd: int, environment: Mapping[str, str]) -> None:
        build = importlib.import_module(f"tests.server.{module}").build
        sys.stdout.flush()
        sys.stderr.flush()
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(build, fd, environment)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run(build: engine_process.Build, fd: int, environment: Mapping[str, str]) -> NoReturn:
    """Be as a process that was started anew: without files and signals of this one."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        os.closerange(3, fd)
        os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update(environment)
        sys.argv = ["engine_process", str(fd)]
        engine_process.main(build)
    finally:
        os._exit(1)


def _start(argv: Sequence[str], **options: Any) -> Any:
    if argv[0] == FORKED:
        return ForkedProcess(argv[1], int(argv[2]), options["env"])
    return subprocess.Popen(argv, **options)


setattr(engine_link, "subprocess", SimpleNamespace(Popen=_start))  # noqa: B010
