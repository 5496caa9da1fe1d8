"""Triton's one-time preparation for compiling, and processes that compile, started before torch is imported."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import queue
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from octavo.plugins import COMPILERS, parts
from octavo.system.child_worker import LENGTH, receive
from octavo.system.cpus import num_cpus

DEVICES = Path("/dev")
NVIDIA_DRIVER = DEVICES / "nvidiactl"
MOST_PROCESSES = 24
"""More are hardly faster: the engine's own part of a compilation is serial."""


class CompilersLost(Exception):
    """The process that was asked has ended."""


class Compilers:
    """Processes that compile kernels next to the engine.

    Half of a compilation is Python: in threads of the engine, compilers wait for each other and delay its steps. The
    processes import the kernels while the engine imports torch, and end with it, or when there was nothing to compile
    for a while; then kernels are compiled in the engine again.
    """

    def __init__(self, count: int, module: str) -> None:
        """Start ``count`` processes. Raises ``OSError`` if none can be started."""
        self.count = count
        pairs = [socket.socketpair() for _ in range(1 + count)]
        theirs = [pair[1] for pair in pairs]
        descriptors = [each.fileno() for each in theirs]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            for each in theirs:
                each.close()
        self._connections = [pair[0] for pair in pairs]
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for connection in self._connections[1:]:  # the first only tells them that this process has ended
            self._idle.put(connection)
        threading.Thread(target=process.wait, name="wait for compilers", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._connections)

    def compile(self, job: bytes) -> str:
        """Have a job done, as soon as a process is idle; returns why it failed, or "".

        Raises ``CompilersLost``.
        """
        connection = self._idle.get()
        try:
            connection.sendall(LENGTH.pack(len(job)) + job)
            answer = receive(connection)
        except OSError:
            answer = None
        finally:
            self._idle.put(connection)
        if answer is None:
            raise CompilersLost
        return answer.decode()


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


@functools.cache
def preparation() -> threading.Thread:
    """The thread that prepares Triton; the first call starts it. Join it before compiling.

    The keys of Triton's compile cache contain a digest of its own files, half a gigabyte, computed on first use. A
    second caller during that time would compute it again.
    """

    def prepare() -> None:
        with contextlib.suppress(ImportError, AttributeError):  # a private name, which may change
            importlib.import_module("triton.runtime.cache").triton_key()

    thread = threading.Thread(target=prepare, name="prepare compiler", daemon=True)
    thread.start()
    return thread


_running: list[Compilers] = []


def compilers() -> Compilers | None:
    """The processes that compile for this one, if they were started."""
    return _running[-1] if _running else None


def start_compilers() -> None:
    """Start the processes that compile for this one, if there is Triton, and a processor for them.

    Each GPU of the host has its share of the processors: there may be an engine, or a rank of one, for each.
    """
    num_gpus = len(list(DEVICES.glob("nvidia[0-9]*")))
    count = min(num_cpus() // max(num_gpus, 1) - 1, MOST_PROCESSES)
    if count >= 1 and not _running and importlib.util.find_spec("triton") is not None:
        with contextlib.suppress(OSError):
            _running.append(Compilers(count, parts(COMPILERS)["triton"].module))


def prepare_if_there_may_be_a_gpu(device: str) -> None:
    """Start the preparation if there is an NVIDIA driver and the setting ``device`` allows a GPU.

    Called before torch, which could tell for certain, is imported: that takes seconds.
    """
    if device != "cpu" and NVIDIA_DRIVER.exists():
        start_compilers()
        preparation()
