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
RETRY_SECONDS = 1.0
"""Until the next attempt to tell of a change, if the manager wants no signs of life."""


class ServiceManager:
    """The service manager that started this process, if one did."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = os.environ.get("WATCHDOG_USEC", "") if is_watched else ""
        self._is_watched = microseconds.isdecimal()
        self._interval = int(microseconds) / 1e6 / 4 if self._is_watched else RETRY_SECONDS
        """Seconds between signs of life: systemd ends a process that gave none for four of them."""
        self._next_sign = 0.0
        self._untold: list[bytes] = []
        """Changes that found the manager's queue full, as signs of life fill it when it is slow: to be told again."""

    def starting(self) -> None:
        """From now on the event loop gives signs of life."""
        if self._address:
            self._be_alive()

    def ready(self) -> None:
        """The server answers."""
        self.tell(READY)

    def stopping(self) -> None:
        self.tell(STOPPING)

    def be_alive_now(self) -> None:
        """Give a sign of life if one is due: for a process without an event loop."""
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + self._interval
            self._give_sign()

    def tell(self, state: bytes) -> None:
        """Tell of a change, now or as soon as there is room in the manager's queue."""
        self._untold.append(state)
        self._tell_rest()

    def _be_alive(self) -> None:
        self._give_sign()
        asyncio.get_running_loop().call_later(self._interval, self._be_alive)

    def _give_sign(self) -> None:
        self._tell_rest()
        if self._is_watched:
            self._send(ALIVE)

    def _tell_rest(self) -> None:
        while self._untold and self._send(self._untold[0]):
            del self._untold[0]

    def _send(self, message: bytes) -> bool:
        """Send one message, if anybody wants it; ``False`` if there is no room for it now."""
        if not self._address:
            return True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(message, self._address)
            except BlockingIOError:
                return False
        return True
