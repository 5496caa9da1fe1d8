"""Compiles kernels for another process: ``python -m octavo_kernels.triton.compiler_process CONTROL CONNECTION...``.

The kernels are imported once; then there is a process for each connection, of which each message is a ``Job``. All end
when the other side closes ``CONTROL``. One that had work and none for a while ends by itself.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from octavo.system.child_worker import LENGTH, receive
from octavo_kernels.triton.backend import BACKEND
from octavo_kernels.triton.compile_jobs import execute

IDLE_SECONDS = 60.0
NICENESS = 5
"""Steps of the engine that these processes compile for come first."""


def main() -> NoReturn:
    """Serve until the other side ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, which the engine handles
    control, *connections = (socket.socket(fileno=int(text)) for text in sys.argv[1:])
    BACKEND.load_kernels()
    importlib.import_module("triton.runtime.cache").triton_key()  # in each process it would take half a second
    gc.freeze()
    parent = os.getpid()
    while connections:
        connection = connections.pop()
        if os.fork() == 0:
            for other in (control, *connections):
                other.close()
            _end_with(parent)
            _serve(connection)
        connection.close()
    threading.Thread(target=_end_after, args=(control,), daemon=True).start()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)


def _end_after(control: socket.socket) -> None:
    control.recv(1)
    os._exit(0)


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    os.nice(NICENESS)


def _serve(connection: socket.socket) -> NoReturn:
    try:
        while (message := receive(connection)) is not None:
            answer = execute(message).encode()
            connection.sendall(LENGTH.pack(len(answer)) + answer)
            connection.settimeout(IDLE_SECONDS)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
