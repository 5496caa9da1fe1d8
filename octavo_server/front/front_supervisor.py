"""``--supervise``: a small parent that starts the server as its child, and again when it dies or its event loop hangs.

It is the child's service manager: it gets the messages that systemd would get (``service_manager.py``), and passes them
on if systemd started it. The child is forked before anything of the server is imported, so the parent stays small. It
holds the listening socket, too: clients that connect while there is no child wait for the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from octavo.errors import ConfigError
from octavo.system.process_exit import processor_time
from octavo_server.front.service_manager import ALIVE, READY, ServiceManager

TICK = 0.1
"""Seconds between two looks at the child."""
START_SECONDS = 60.0
"""A server that starts hangs when it gave no sign of life for at least so long, and used no processor time: before it
has an event loop it imports modules, and may fetch a model."""
LOOK_SECONDS = 1.0
"""Between two looks at what a server that starts has used."""
MOST_FAILED_STARTS = 5
"""A server that was never ready and is killed is started so often."""
LEAST_PAUSE, MOST_PAUSE = 0.1, 5.0
"""Seconds before another start, twice as many after each that fails."""
STEADY_SECONDS = 30.0
"""A server that was ready for so long did not fail to start."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address. Raises ``ConfigError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def supervise(seconds: float) -> int | None:
    """Fork. In the child: ``None``, and the caller goes on to serve. In the parent: its exit code, in the end.

    A server that was ready and gives no sign of life for ``seconds`` is killed and started again; see also
    ``START_SECONDS``.
    """
    folder = Path(tempfile.mkdtemp(prefix="octavo_"))  # of this user only
    address = str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address)
        code = _Parent(receiver, seconds).run()
    if code is None:
        os.environ |= {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(round(seconds * 1e6))}
        os.environ.pop("WATCHDOG_PID", None)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return code


class _Parent:
    def __init__(self, receiver: socket.socket, bound: float) -> None:
        self._bound = bound
        """Seconds without a sign of life after which the child hangs."""
        self._receiver = receiver
        self._manager = ServiceManager()
        self._child = 0
        """Process id; 0 while there is none."""
        self._is_stopping = False
        self._was_ready = False
        self._num_failed = 0
        """Starts in a row that were no success."""

    def run(self) -> int | None:
        """The exit code, or ``None`` in a child."""
        for number in PASSED_ON:
            signal.signal(number, self._on_signal)
        while True:
            if self._fork():
                return None
            code, steady = self._watch()
            self._child = 0
            self._num_failed = 0 if steady else self._num_failed + 1
            if self._is_stopping or code == 0:
                return code if code >= 0 else 1
            if not self._was_ready and (code > 0 or self._num_failed >= MOST_FAILED_STARTS):
                return code if code > 0 else 1
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            _say(f"the server {how}; it is started again")
            self._pause()
            if self._is_stopping:
                return 0

    def _fork(self) -> bool:
        """Start a child; returns whether this process is it."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        parent = os.getpid()
        self._child = os.fork()
        is_child = self._child == 0
        if is_child:
            os.setsid()  # Ctrl-C in a terminal reaches the parent only, which passes it on
            for number in PASSED_ON:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.suppress(OSError, AttributeError):  # Linux has it
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # so that the port is free
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return is_child

    def _watch(self) -> tuple[int, bool]:
        """Wait for the end of the child, and kill it when it hangs.

        Returns its exit code, negative if it was ended by a signal, and whether it had been ready for long.
        """
        ready_at: float | None = None
        last_sign = last_look = used_at = time.monotonic()
        bound, used = max(self._bound, START_SECONDS), 0
        while True:
            for message in self._messages():
                last_sign = time.monotonic()
                if message == READY:
                    ready_at, bound = last_sign, self._bound
                    self._was_ready = True
                if message != ALIVE:
                    self._manager.tell(message)
            code, now = self._exit_code(), time.monotonic()
            if code is not None:
                return code, ready_at is not None and now - ready_at > STEADY_SECONDS
            self._manager.be_alive_now()
            if ready_at is None and now - used_at > LOOK_SECONDS:
                before, used, used_at = used, processor_time(self._child) or 0, now
                last_sign = last_sign if used == before else now
            if now - last_look > bound / 2:  # this process stood still, and perhaps the child with it
                last_sign = now
            last_look = now
            if now - last_sign > bound:
                _say(f"the server gave no sign of life for {bound:g} s; it is killed")
                os.kill(self._child, signal.SIGKILL)
                last_sign = now

    def _exit_code(self) -> int | None:
        """Of the child, if it has ended. Other processes become children here if this is the first of a container."""
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == self._child:
                return os.waitstatus_to_exitcode(ended[1])
        return None

    def _messages(self) -> list[bytes]:
        """What the child says within a tick, all of it."""
        found: list[bytes] = []
        self._receiver.settimeout(TICK)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while True:
                found.append(self._receiver.recv(256))
                self._receiver.setblocking(False)
        return found

    def _pause(self) -> None:
        until = time.monotonic() + (min(LEAST_PAUSE * 2**self._num_failed, MOST_PAUSE) if self._num_failed > 1 else 0)
        while time.monotonic() < until and not self._is_stopping:
            time.sleep(TICK)
            self._manager.be_alive_now()

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopping = True
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)


def _say(text: str) -> None:
    print(f"octavo: warning: {text}", file=sys.stderr, flush=True)
