"""A managed upstream: its process is started, restarted with backoff, and ended with this server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from octavo.errors import ConfigError, OctavoError

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
YOUNG_SECONDS = 60.0
"""A process that ran for longer is restarted at once."""
POLL_SECONDS = 0.02
STOP_SECONDS, HUNG_SECONDS = 12.0, 4.0
"""Between SIGTERM and SIGKILL: it has no requests any more, but may have cached blocks to write to its disk; and of one
that does not answer."""

logger = logging.getLogger("octavo.server")


class UpstreamProcess:
    """Runs a command. Its output goes where this process's goes; its descendants get its signals."""

    def __init__(self, command: str, hang_timeout: float) -> None:
        """Raises ``ConfigError`` for a command that cannot be split into words."""
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"upstream_command: {error}") from None
        if not self._argv:
            raise ConfigError("upstream_command: is empty")
        self.num_restarts = 0
        self._hang_timeout = hang_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause = FIRST_PAUSE

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, wait_up: Callable[[], Awaitable[None]]) -> None:
        """Start the process and wait for ``wait_up``. Raises ``OctavoError`` if the process ends first."""
        self._launch()
        waiting = asyncio.ensure_future(wait_up())
        try:
            while not waiting.done():
                if (status := self._status()) is not None:
                    raise OctavoError(f"upstream_command ended with status {status} before it answered")
                await asyncio.wait([waiting], timeout=POLL_SECONDS)
            waiting.result()
        except BaseException:
            waiting.cancel()
            await self.stop()
            raise

    async def watch(self, silent_seconds: float) -> bool:
        """Restart the process if it ended, or if the upstream was silent for too long; return whether it was."""
        status = self._status()
        if status is None and silent_seconds < self._hang_timeout:
            return False
        if status is None:
            logger.error("the upstream did not answer for %.0f s and is restarted", silent_seconds)
            await self.stop(HUNG_SECONDS)
        else:
            logger.error("upstream_command ended with status %d and is restarted", status)
            self._signal(signal.SIGKILL)  # what it left behind would keep its port
        if time.monotonic() - self._started > YOUNG_SECONDS:
            self._pause = FIRST_PAUSE
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.num_restarts += 1
        try:
            self._launch()
        except OctavoError as error:
            logger.error("%s", error)
        return True

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the process: SIGTERM, and SIGKILL after so many seconds."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self._status() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self._signal(signal.SIGKILL)
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    def _launch(self) -> None:
        guard = [sys.executable, "-m", "octavo_fleet.proxy.end_with_parent"]
        # A process group of its own: only this process gets Ctrl-C, and drains.
        try:
            self._process = subprocess.Popen([*guard, *self._argv], process_group=0, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise OctavoError(f"upstream_command cannot be started: {error}") from None
        self._started = time.monotonic()

    def _status(self) -> int | None:
        return -1 if self._process is None else self._process.poll()

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process group, which may outlive its first process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
