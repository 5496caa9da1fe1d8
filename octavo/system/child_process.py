"""A child process for work that may hang or exhaust memory: its time and memory are limited, and it can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import Unavailable
from octavo.system.child_worker import LENGTH, MAX_ERROR_BYTES, OUT_OF_MEMORY, READY
from octavo.system.process_exit import time_of_process

Argument = TypeVar("Argument")
Result = TypeVar("Result")

START_SECONDS = 60.0
"""Timeout of the child's start; its imports are slow on a loaded machine."""
LOOK_SECONDS = 0.1
"""Between two looks at what a child that has not answered has used."""
RETRY_SECONDS = 1
SIGNALS_OF_LIMITS = (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGABRT)
"""Exit statuses of a process that used up what it may use; libraries in Rust abort where there is no memory."""
_PACKAGE_PARENT = str(Path(__file__).parents[2])
_ENVIRONMENT = ("PATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
"""Environment variables that the child inherits: enough to start, no secrets."""
_ONE_THREAD = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "1",
}
"""Libraries would start a thread for each processor, whose stack and heap take some 70 MiB of addresses: with 64 of
them, nothing of what the child may use would be left."""


class ChildLost(Exception):
    """The process timed out or ended, and is no longer running. The message gives the cause."""


class ChildProcess:
    """A process that runs ``module``, which follows the protocol of ``ChildWorker``. Not thread-safe."""

    def __init__(self, module: str, settings: dict[str, Any], more: bytes | None = None) -> None:
        """``more`` is a second message, if the module reads one.

        Raises ``Unavailable`` if this machine cannot start a process now, ``ChildLost`` if the process ends at once.
        """
        self._settings = settings
        try:
            self._connection, self._process = _start(module)
        except OSError as error:  # such as too many open files: not the fault of what the process is for
            reason = f"A process for this request could not be started ({error.strerror}). Try again in a moment."
            raise Unavailable(reason, retry_after=RETRY_SECONDS) from None
        self.id = self._process.pid
        self.close = weakref.finalize(self, _end, self._process, self._connection)
        """Ends the process; also called when this object is collected or the interpreter exits."""
        messages = [json.dumps(settings).encode()] if more is None else [json.dumps(settings).encode(), more]
        if self._exchange(messages, START_SECONDS)[:1] != READY:
            raise ChildLost("its process did not start")

    @property
    def is_alive(self) -> bool:
        return self.close.alive and self._process.poll() is None

    def ask(self, question: Any) -> tuple[bytes, str]:
        """Send ``question``; return the kind of the answer and its text.

        Raises ``ChildLost`` without an answer, ``TypeError`` if ``question`` cannot be encoded as JSON.
        """
        kind, body = self.ask_bytes(json.dumps(question).encode())
        return kind, body.decode("utf-8", "replace")

    def ask_bytes(self, question: bytes) -> tuple[bytes, bytes]:
        """Send ``question``; return the kind of the answer and its bytes. Raises ``ChildLost`` without an answer."""
        answer = self._exchange([question], self._settings["max_seconds"])
        return answer[:1], answer[1:]

    def _exchange(self, messages: list[bytes], seconds: float) -> bytes:
        try:
            return self._exchange_within(messages, _Patience(self.id, self._connection, seconds))
        except TimeoutError:
            problem = f"it took more than {seconds:g} seconds"
        except OSError:
            problem = self._cause_of_death()
        self.close()
        raise ChildLost(problem)

    def _exchange_within(self, messages: list[bytes], patience: _Patience) -> bytes:
        for message in messages:
            rest = memoryview(LENGTH.pack(len(message)) + message)
            while rest:
                rest = rest[patience.wait_for(self._connection.send, rest) :]
        (size,) = LENGTH.unpack(self._receive(LENGTH.size, patience))
        if size > 1 + max(self._settings["max_output"], MAX_ERROR_BYTES):
            raise ConnectionError("message exceeds the size limit")
        return self._receive(size, patience)

    def _receive(self, size: int, patience: _Patience) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = patience.wait_for(self._connection.recv, min(size - len(data), 1 << 20))
            if not piece:
                raise ConnectionError("closed by the child")
            data += piece
        return bytes(data)

    def _cause_of_death(self) -> str:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=1)
        if status == OUT_OF_MEMORY:
            return f"it needed more than {self._settings['max_memory'] >> 20} MiB of memory"
        if status is None or status in SIGNALS_OF_LIMITS:
            return "it used up its memory or processor time"
        return f"its process ended with {status}"


class _Patience:
    """How long a child is waited for: until it has used so many seconds of processor time, or used none for so long.

    Looks are counted, not the time between them: where a machine is busy or stands still, it is no fault of the child.
    """

    def __init__(self, pid: int, connection: socket.socket, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self._look_seconds = min(LOOK_SECONDS, seconds / 4)
        connection.settimeout(self._look_seconds)
        self._first = self._used = -1
        """Clock ticks that it had used at the first look and at the last one; -1 before."""
        self._idle_seconds = 0.0

    def wait_for(self, call: Callable[[Argument], Result], argument: Argument) -> Result:
        """The result of a call of the connection. Raises ``TimeoutError``."""
        while True:
            with contextlib.suppress(TimeoutError):
                return call(argument)
            before, self._used = self._used, time_of_process(self._pid)[0]
            if before < 0:
                before = self._first = self._used
            self._idle_seconds = self._idle_seconds + self._look_seconds if self._used == before else 0.0
            used_seconds = (self._used - self._first) / os.sysconf("SC_CLK_TCK")
            if max(self._idle_seconds, used_seconds) >= self._seconds:
                raise TimeoutError


def _start(module: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process, and a connection to it."""
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    paths = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError:
            ours.close()
            raise
    return ours, process


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
