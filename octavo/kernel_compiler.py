"""Kernels for GPUs, compiled by other processes: compiling is Python for the most part, and a process has one lock.

``octavo.ops.triton.compile_server`` is the other side. What it compiles, this process finds in Triton's cache; what it
does not, this process compiles itself when it loads it. So nothing but time depends on the server.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

SERVER = "octavo.ops.triton.compile_server"
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
MAX_SECONDS = 120.0
"""For all that is compiled at once; a server that takes longer is ended."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The server forks, which is safe only while it has no other threads."""

logger = logging.getLogger("octavo.engine")


class KernelCompiler:
    """A server of this process, which starts when it is first needed, or told to."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] | None = None

    def start(self) -> None:
        """Let the server begin to import what it needs, unless it has; for seconds that would be waited for later."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ONE_THREAD},
                text=True,
            )
            self._end = weakref.finalize(self, _end, self._process)

    def compile(self, target: Iterable[object], specializations: Iterable[str]) -> None:
        """Have these compiled for a GPU, many at a time: the fields of Triton's target, and data of its cache hook."""
        lines = [json.dumps([*target]), *specializations, ""]
        try:
            self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(MAX_SECONDS, process.kill)
            timer.start()
            try:
                process.stdin.write("\n".join(lines) + "\n")
                process.stdin.flush()
                if not process.stdout.readline():
                    raise ChildProcessError(f"it ended with status {process.wait()}")
            finally:
                timer.cancel()
        except OSError as error:
            logger.warning("kernels are compiled one by one, as the process for it failed: %s", error)
            self.close()

    def close(self) -> None:
        """End the server, if there is one; also done when this object goes."""
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
