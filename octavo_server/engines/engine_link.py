"""The front process's handle on one engine process: the child process and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from octavo.errors import OctavoError
from octavo.telemetry.cache_view import SessionOrder, SessionReport
from octavo.telemetry.logs import current_format, current_level
from octavo.types import EngineInfo, WeightOrder
from octavo_server.engines import wire
from octavo_server.engines.process_exit import is_from_outside, num_oom_kills

POLL_SECONDS = 0.005
GONE = "the engine process ended meanwhile; try again"

Key = TypeVar("Key")
logger = logging.getLogger("octavo.server")


class EngineLink(asyncio.Protocol):
    """Starts one engine process and exchanges messages with it until either end closes the socket.

    ``ready`` resolves when the engine is built, or fails with the reason. ``closed`` is set when the connection ended;
    nothing is delivered after that.
    """

    def __init__(self, generation: int, on_step: Callable[[wire.StepDone], None]) -> None:
        self.generation = generation
        self.last_sign = time.monotonic()
        """Monotonic time of the engine process's last message, or of its start."""
        self.started = self.last_sign
        self.has_delivered = False
        """Whether it ever delivered an output."""
        self.ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self._adapters: dict[str, asyncio.Future[str]] = {}
        """Pending load and unload requests by adapter name; each resolves to an error message or ""."""
        self._slept: dict[bool, asyncio.Future[str]] = {}
        """Pending answers to ``Sleep`` (true) and ``Wake``, as those of ``_adapters``."""
        self._ordered: list[asyncio.Future[tuple[str, bool]]] = []
        """Pending answers to ``OrderWeights``, in order."""
        self.checksums: dict[str, str] = {}
        """Those of the last answer."""
        self._asked: list[asyncio.Future[SessionReport]] = []
        """Pending answers to ``OrderSessions``, in order."""
        self._settling: list[asyncio.Future[str]] = []
        """Pending answers to ``Settle``, in order."""
        self._on_step = on_step
        self._reader = wire.FrameReader()
        self._transport: Any = None
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._was_killed = False
        self._num_oom_kills: int | None = None
        """The machine's number of out-of-memory kills before the process was started."""

    def start_process(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``argv + [FD]`` with these environment variables added; raise ``OSError`` when it cannot be started."""
        self._num_oom_kills = num_oom_kills()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                fd = theirs.fileno()
                # A separate process group: only the front process gets Ctrl-C, and drains.
                env = {**os.environ, **environment}
                self._process = subprocess.Popen([*argv, str(fd)], pass_fds=[fd], process_group=0, env=env)
        except OSError:
            ours.close()
            self.closed.set()
            raise
        ours.setblocking(False)
        self._socket = ours

    async def connect(self, config: dict[str, Any], expects_grammars: bool) -> None:
        """Open the connection and send the configuration."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)
        self.send(wire.Start(self.generation, config, current_level(), current_format(), expects_grammars))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and not self.closed.is_set() and self.ready.exception() is None

    def send(self, message: wire.ToEngine) -> None:
        """Send one message, or drop it if the process is gone. Raises ``FrameError`` if it cannot be encoded."""
        frame = wire.pack(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def change_adapter(self, message: wire.LoadAdapter | wire.UnloadAdapter) -> str:
        """Send a load or unload request and wait for its error message, "" on success. One at a time per name."""
        if self.closed.is_set():
            return GONE
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._adapters[message.name] = answer
        self.send(message)
        problem: str = await answer
        return problem

    async def change_sleep(self, message: wire.Sleep | wire.Wake) -> str:
        """Have the process fall asleep or wake, and wait for its error message, "" on success."""
        if self.closed.is_set():
            return GONE
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._slept[isinstance(message, wire.Sleep)] = answer
        self.last_sign = time.monotonic()  # one that slept was silent for long
        self.send(message)
        return await answer

    async def order_weights(self, order: WeightOrder) -> tuple[str, bool]:
        """Have the process do what a trainer asks for; return its error message, and whether it is still receiving."""
        if self.closed.is_set():
            return GONE, False
        answer: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        self._ordered.append(answer)
        self.send(wire.OrderWeights(self.generation, order))
        return await answer

    async def order_sessions(self, order: SessionOrder) -> SessionReport:
        """Have the process do what is asked about sessions; it has none if it is gone."""
        if self.closed.is_set():
            return SessionReport()
        answer: asyncio.Future[SessionReport] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self.send(wire.OrderSessions(self.generation, order))
        return await answer

    async def settle(self, clears_cache: bool = False) -> None:
        """Wait until every output under way has arrived, or the process is gone."""
        if not self.closed.is_set():
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._settling.append(answer)
            self.send(wire.Settle(self.generation, clears_cache))
            await answer

    def has_exited(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL unless the process has exited; never signals a process that is not a child of this one."""
        if not self.has_exited():
            assert self._process is not None
            self._was_killed = True
            self._process.kill()
        self.disconnect()

    def disconnect(self) -> None:
        """Close the socket, which makes the engine process end; ``closed`` follows."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_exit(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until the process has exited and is reaped; return whether it has."""
        deadline = time.monotonic() + seconds
        while not self.has_exited():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    @property
    def is_ended_from_outside(self) -> bool:
        """Whether a third process ended it: not this one, not its own fault, not out of memory."""
        status = None if self._process is None else self._process.poll()
        return status is not None and not self._was_killed and is_from_outside(status, self._may_have_run_out_of_memory)

    @property
    def _may_have_run_out_of_memory(self) -> bool:
        before, now = self._num_oom_kills, num_oom_kills()
        return before is not None and now is not None and now > before

    def describe_exit(self) -> str:
        """How the process ended, for the log."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return "still running"
        if status >= 0:
            return f"exit status {status}"
        if self._was_killed:
            return "killed by this process"
        is_out_of_memory = -status == signal.SIGKILL and self._may_have_run_out_of_memory
        return f"killed by signal {-status}" + (", as memory ran out" if is_out_of_memory else "")

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._receive(wire.unpack_from_engine(payload))
        except wire.FrameError as error:
            logger.error("engine process %s sent an invalid message and is killed: %s", self.pid, error)
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        for name in list(self._adapters):
            self._answer(self._adapters, name, GONE)
        for is_asleep in list(self._slept):
            self._answer(self._slept, is_asleep, GONE)
        while self._settling:
            self._end_settling()
        while self._ordered:
            self._end_order(GONE, False)
        while self._asked:
            self._end_asking(SessionReport())
        if not self.ready.done():
            self._fail(OctavoError("the engine process ended while it was starting; its output says why"))

    def _receive(self, message: wire.FromEngine) -> None:
        if message.generation != self.generation or self.closed.is_set():
            return
        self.last_sign = time.monotonic()
        if isinstance(message, wire.StepDone):
            self.has_delivered = self.has_delivered or bool(message.outputs)
            self._on_step(message)
        elif isinstance(message, wire.AdapterDone):
            self._answer(self._adapters, message.name, message.error)
        elif isinstance(message, wire.SleepDone):
            self._answer(self._slept, message.is_asleep, message.error)
        elif isinstance(message, wire.Settled):
            self._end_settling()
        elif isinstance(message, wire.SessionsDone):
            self._end_asking(message.report)
        elif isinstance(message, wire.WeightsDone):
            self.checksums = message.checksums
            self._end_order(message.error, message.is_busy)
        elif isinstance(message, wire.BuildFailed):
            self._fail(message.as_error())
        elif not self.ready.done():
            self.ready.set_result(message.info)

    def _end_order(self, error: str, is_busy: bool) -> None:
        answer = self._ordered.pop(0)
        if not answer.done():
            answer.set_result((error, is_busy))

    def _end_asking(self, report: SessionReport) -> None:
        answer = self._asked.pop(0)
        if not answer.done():
            answer.set_result(report)

    def _end_settling(self) -> None:
        answer = self._settling.pop(0)
        if not answer.done():
            answer.set_result("")

    @staticmethod
    def _answer(pending: dict[Key, asyncio.Future[str]], key: Key, error: str) -> None:
        answer = pending.pop(key, None)
        if answer is not None and not answer.done():
            answer.set_result(error)

    def _fail(self, error: OctavoError) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved, in case there is no waiter any more
