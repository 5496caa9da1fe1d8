"""Tells systemd, or ``--supervise``, that the server is ready, that its event loop runs, and that it ends.

The protocol is that of sd_notify(3). Without ``NOTIFY_SOCKET`` in the environment nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

READY, ALIVE, STOPPING = b"READY=1", b"WATCHDOG=1", b"STOPPING=1"


class ServiceManager:
    """The service manager that started this process, if one did."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = os.environ.get("WATCHDOG_USEC", "") if is_watched else ""
        self._interval = int(microseconds) / 1e6 / 4 if microseconds.isdecimal() else 0.0
        """Seconds between signs of life: systemd ends a process that gave none for four of them. 0: it does not."""
        self._next_sign = 0.0

    def starting(self) -> None:
        """From now on the event loop gives signs of life."""
        if self._interval:
            self._be_alive()

    def ready(self) -> None:
        """The server answers."""
        self.tell(READY)

    def stopping(self) -> None:
        self.tell(STOPPING)

    def be_alive_now(self) -> None:
        """Give a sign of life if one is due: for a process without an event loop."""
        if self._interval and time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + self._interval
            self.tell(ALIVE)

    def _be_alive(self) -> None:
        self.tell(ALIVE)
        asyncio.get_running_loop().call_later(self._interval, self._be_alive)

    def tell(self, state: bytes) -> None:
        """Send one message, if anybody wants it."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state, self._address)
