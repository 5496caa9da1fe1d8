"""The server that gets the faults: started again by this process whenever it ended, with the same folders."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo_bench.chaos import processes
from octavo_bench.chaos.careful_client import Excuses
from octavo_bench.serving.server_process import ServerProcess
from octavo_fleet.proxy.connections import ConnectionFailed, Connections

START_SECONDS = 120.0
LOOK_SECONDS = 0.02
ANSWER_SECONDS = 2.0
DISK_BYTES = 128 << 20
"""Size of the file system that journal and state are on."""


class Disk:
    """A folder on a small file system of its own, where this process may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        self.is_mounted = subprocess.run(command, capture_output=True).returncode == 0
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leave no room for anything."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(512)):
                pass

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


class ServerUnderTest:
    """One server. Faults are done to it from outside, by signals, limits and the disk."""

    def __init__(self, model: Sequence[str], port: int, folder: Path, logs: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.excuses = Excuses()
        self.disk = Disk(folder / "disk")
        self.num_starts = 0
        self.kills: Counter[str] = Counter()
        """Processes that were ended by a signal that cannot be handled, or that means a crash."""
        self.is_supervised = "--supervise" in model
        self._logs = logs
        self._command = [sys.executable, "-m", "octavo", "serve", *model, "--port", str(port)]
        self._command += ["--journal", str(self.journal), "--state-dir", str(self.disk.folder / "state")]
        self._command += ["--engine-timeout", "3", "--shutdown-timeout", "1", "--log-level", "warning"]
        self._connections = Connections(self.url + "/")
        self._earlier: list[int] = []
        """Sessions of servers that ended."""
        self._server: ServerProcess | None = None

    @property
    def journal(self) -> Path:
        return self.disk.folder / "journal"

    # --- processes ---

    @property
    def front(self) -> int:
        """The front process: a child of the process that was started, if that has one that serves (``--supervise``)."""
        assert self._server is not None
        pid = self._server.process.pid
        children = processes.children(pid) if self.is_supervised else []
        return children[0] if children else pid

    @property
    def engine(self) -> int | None:
        return processes.engine_of(self.front)

    async def next_engine(self) -> int:
        """The engine process, once there is one."""
        while (found := self.engine) is None:
            if self._server is not None and self._server.process.poll() is not None:
                raise ChildProcessError("the server ended")
            await asyncio.sleep(LOOK_SECONDS)
        return found

    def launch(self) -> None:
        """Start the server, without waiting for it."""
        self.num_starts += 1
        log = self._logs / f"server_{self.num_starts}.log"
        self._server = ServerProcess(self._command, self.url, log=log)

    async def wait_ready(self) -> None:
        """Raises ``ConfigError`` if the server ends or takes too long."""
        assert self._server is not None
        await asyncio.to_thread(self._server.wait_ready, START_SECONDS)

    async def wait_ready_again(self) -> None:
        """As ``wait_ready``, of a server that may just end and is then started again, as a service manager does it."""
        try:
            await self.wait_ready()
        except ConfigError:
            if self.ended_by_itself() is None:
                raise
            self.launch()
            await self.wait_ready()

    async def end(self, number: signal.Signals) -> None:
        """Send the server a signal, and wait until it has ended."""
        assert self._server is not None
        self._earlier.append(self.front)
        self.kills["front"] += number == signal.SIGKILL
        self._server.process.send_signal(number)
        await asyncio.to_thread(self._server.process.wait, START_SECONDS)

    async def end_child(self, number: signal.Signals) -> None:
        """End or stop the front process of a supervised server, and wait until there is another one."""
        ended = self.front
        self._earlier.append(ended)
        self.kills["front"] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(ended, number)
        assert self._server is not None
        while self.front in (ended, self._server.process.pid):
            await asyncio.sleep(LOOK_SECONDS)
        await self.wait_ready()

    def ended_by_itself(self) -> int | None:
        """The exit code of a server that nobody ended."""
        return None if self._server is None else self._server.process.poll()

    def left_over(self) -> list[int]:
        """Processes of servers that ended."""
        return [pid for leader in self._earlier for pid in processes.session(leader)]

    def send(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.kills["engine"] += number not in (signal.SIGSTOP, signal.SIGCONT)

    # --- answers ---

    async def get(self, path: str) -> Any:
        """The JSON at ``path``. Raises ``ConnectionFailed``, also for another status than 200."""
        async with self._connections.request("GET", path) as connection:
            body = await connection.read_all()
            if connection.status != 200:
                raise ConnectionFailed(f"status {connection.status}")
            return json.loads(body)

    async def seconds_until_answer(self, since: float) -> float:
        """Seconds from ``since`` until a request for one token was answered."""
        data = b'{"prompt": [1, 2], "max_tokens": 1}'
        headers = [(b"content-type", b"application/json")]
        for _ in itertools.count():
            with contextlib.suppress(ConnectionFailed, TimeoutError):
                async with (
                    asyncio.timeout(ANSWER_SECONDS),
                    self._connections.request("POST", "v1/completions", headers, data) as connection,
                ):
                    if connection.status == 200:
                        break
            await asyncio.sleep(LOOK_SECONDS)
        return time.perf_counter() - since

    def close(self) -> None:
        self._connections.close()
        if self._server is not None:
            with contextlib.suppress(OSError):
                os.kill(self.front, signal.SIGCONT)
            self._server.stop()
        self.disk.close()
