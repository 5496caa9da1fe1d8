"""The processes of ranks, of an engine all but the first: started early, as imports take seconds, never left over.

Nothing here imports torch, so that the first rank can import it while the others do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection


class RankProcesses:
    """Processes that import what a rank needs, and then wait for the first message of a ``RankGroup``.

    The thread that starts them lives until ``end``: when it ends, the kernel kills them (``rank_process``), so that
    none is left over however this process ends.
    """

    def __init__(self, count: int) -> None:
        """Start so many. Raises ``OSError`` if a process cannot be started."""
        self._count = count
        self.descriptor = os.memfd_create("octavo-ranks")
        """A file, empty at first, whose memory all ranks will share."""
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._failure: OSError | None = None
        self._is_started, self._is_ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-rank-processes", daemon=True)
        self._thread.start()
        self._is_started.wait()
        if self._failure is not None:
            self.end()
            raise self._failure

    def end(self) -> None:
        """Kill them, and wait until they have ended."""
        self._is_ending.set()
        self._thread.join()
        for connection in self.connections:
            connection.close()
        self.close_memory()

    def close_memory(self) -> None:
        """Close the descriptor, when the memory is mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _run(self) -> None:
        try:
            for _ in range(self._count):
                self._start()
        except OSError as error:
            self._failure = error
        self._is_started.set()
        self._is_ending.wait()
        for process in self.processes:
            process.kill()
            process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), self.descriptor]
            command = [sys.executable, "-m", "octavo.rank_process", *map(str, descriptors), str(os.getpid())]
            process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        self.connections.append(Connection(ours.detach()))
