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
from octavo.system.process_exit import is_from_outside, num_oom_kills
from octavo.telemetry.cache_view import SessionOrder, SessionReport
from octavo.telemetry.logs import current_format, current_level
from octavo.types import EngineInfo, Request, WeightOrder
from octavo_server.engines import wire
from octavo_server.engines.sent_pixels import KeptPixels

POLL_SECONDS = 0.005
GONE = "the engine process ended meanwhile; try again"

Answer = TypeVar("Answer")
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
        self.checksums: dict[str, str] = {}
        """Those of the last answer to ``OrderWeights``."""
        self._asked: dict[object, list[tuple[asyncio.Future[Any], Any]]] = {}
        """Pending answers in order, by what is asked, and what each is if the process ends before it gives one."""
        self._kept = KeptPixels(has_pixels=False)
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

    def submit(self, request: Request) -> None:
        """Send a request, or drop it if the process is gone. Raises ``FrameError`` if it cannot be encoded."""
        self.send(wire.Submit(self.generation, self._kept.without_known(request)))
        self._kept.note(request.images)

    def send(self, message: wire.ToEngine) -> None:
        """Send one message, or drop it if the process is gone. Raises ``FrameError`` if it cannot be encoded."""
        frame = wire.pack(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def _ask(self, what: object, message: wire.ToEngine, if_gone: Answer) -> Answer:
        """Send a message and wait for the answer, see ``_answer``; it is ``if_gone`` without the process."""
        if self.closed.is_set():
            return if_gone
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.send(message)
        self._asked.setdefault(what, []).append((answer, if_gone))
        return await answer

    async def change_adapter(self, message: wire.LoadAdapter | wire.UnloadAdapter) -> str:
        """Send a load or unload request and wait for its error message, "" on success. One at a time per name."""
        return await self._ask(message.name, message, GONE)

    async def change_sleep(self, message: wire.Sleep | wire.Wake) -> str:
        """Have the process fall asleep or wake, and wait for its error message, "" on success."""
        self.last_sign = time.monotonic()  # one that slept was silent for long
        return await self._ask(isinstance(message, wire.Sleep), message, GONE)

    async def order_weights(self, order: WeightOrder) -> tuple[str, bool]:
        """Have the process do what a trainer asks for; return its error message, and whether it is still receiving."""
        return await self._ask(wire.OrderWeights, wire.OrderWeights(self.generation, order), (GONE, False))

    async def order_sessions(self, order: SessionOrder) -> SessionReport:
        """Have the process do what is asked about sessions; it has none if it is gone."""
        return await self._ask(wire.OrderSessions, wire.OrderSessions(self.generation, order), SessionReport())

    async def settle(self, clears_cache: bool = False) -> None:
        """Wait until every output under way has arrived, or the process is gone."""
        await self._ask(wire.Settle, wire.Settle(self.generation, clears_cache), None)

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
        for what, pending in self._asked.items():
            for _, if_gone in list(pending):
                self._answer(what, if_gone)
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
            self._answer(message.name, message.error)
        elif isinstance(message, wire.SleepDone):
            self._answer(message.is_asleep, message.error)
        elif isinstance(message, wire.Settled):
            self._answer(wire.Settle, None)
        elif isinstance(message, wire.SessionsDone):
            self._answer(wire.OrderSessions, message.report)
        elif isinstance(message, wire.WeightsDone):
            self.checksums = message.checksums
            self._answer(wire.OrderWeights, (message.error, message.is_busy))
        elif isinstance(message, wire.BuildFailed):
            self._fail(message.as_error())
        elif not self.ready.done():
            self.ready.set_result(message.info)

    def _answer(self, what: object, value: object) -> None:
        """Give the one who asked first what was answered; ``what``: the adapter's name, whether it shall sleep, or the
        kind of the question."""
        if pending := self._asked.get(what):
            answer, _ = pending.pop(0)
            if not answer.done():
                answer.set_result(value)

    def _fail(self, error: OctavoError) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved, in case there is no waiter any more
