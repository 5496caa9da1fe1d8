"""The engine process: builds an engine and runs its steps for a front process connected by a socket.

Run as ``python -m octavo_server.engines.engine_process FD``, where ``FD`` is an inherited socket. This process is
disposable: the front process can restore all of its state, so it may be killed at any time. It ends when the socket
closes, when its parent dies, and on SIGTERM; it ignores SIGINT, which the parent handles.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from octavo.config import QUICK, EngineConfig, ModelSettings
from octavo.engine.protocols import EngineBackend, EngineLike
from octavo.errors import CANCELLATIONS, CheckpointError, OctavoError, RanksLost, RequestError, WorkerLost
from octavo.plugins import ENGINE_BACKENDS, load, parts
from octavo.runtime.ranks.rank_processes import RankProcesses
from octavo.system.garbage_collection import importing, leave_out_what_exists
from octavo.system.kernel_compiler import prepare_if_there_may_be_a_gpu
from octavo.telemetry.logs import log_to_stderr
from octavo.telemetry.phases import Phases
from octavo.types import ChecksumWeights, EngineInfo, EngineStats, Output, WeightOrder
from octavo_server.engines import wire
from octavo_server.engines.sent_pixels import KeptPixels

SWITCH_INTERVAL = 0.0001
"""Seconds after which a thread yields the GIL. The step thread needs it several times per step and would wait 5 ms, the
default, for each of several computing threads."""
IDLE_WAIT = 0.001
"""Seconds to wait for messages after a step without progress."""
REST_WAIT = 0.002
"""Seconds to wait for the next part of a message."""

logger = logging.getLogger("octavo.engine")


Build = Callable[[EngineConfig], tuple[EngineLike, EngineInfo]]


class FrontGone(Exception):
    """The front process closed the socket."""


class EngineChannel:
    """The engine process's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = wire.FrameReader()

    def send(self, message: wire.FromEngine) -> None:
        """Send one message; blocks while the socket's buffer is full."""
        try:
            self._socket.sendall(wire.pack(message))
        except (BrokenPipeError, ConnectionResetError):
            raise FrontGone from None

    def receive(self, wait: bool) -> list[wire.ToEngine]:
        """The messages that arrived; with ``wait``, blocks for at least one. Raises ``FrontGone`` at end of stream.

        The rest of a message of which a part is here is waited for, as long as more of it comes: images are larger than
        the socket's buffer, and would take as many steps as they are times larger.
        """
        while True:
            try:
                data = self._socket.recv(1 << 18, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except ConnectionResetError:
                raise FrontGone from None
            if not data:
                raise FrontGone
            payloads = self._reader.feed(data)
            if payloads or (not wait and not self.wait_readable(REST_WAIT)):
                return [wire.unpack_to_engine(payload) for payload in payloads]

    def wait_readable(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for data; return whether there is any."""
        return bool(select.select([self._socket], [], [], seconds)[0])


class EngineLoop:
    """Runs engine steps, and handles the front process's messages between them."""

    def __init__(self, engine: EngineLike, channel: EngineChannel, generation: int) -> None:
        self.engine = engine
        self.channel = channel
        self.generation = generation
        self._kept = KeptPixels(has_pixels=True)
        self._refusals: list[wire.Refusal] = []
        self._progress = (0, 0)
        self._wants_view = False
        """Whether the next report shall have a view of the KV cache."""
        self._steps_left: int | None = None
        """Steps until it holds; ``None`` if it does not."""
        self._stopped = False

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and self._steps_left != 0

    def run(self) -> None:
        """Run until a ``Stop`` message. Raises ``FrontGone`` when the front process closed the socket."""
        while not self._stopped:
            if not self.engine.has_work:
                self._save_until_message()
            messages = self.channel.receive(wait=not self._can_step)
            for message in messages:
                if message.generation == self.generation:
                    self._handle(message)
            if self._can_step:
                spare = self.engine.spare_seconds()
                if spare <= 0 or not self.channel.wait_readable(spare):
                    self._step()
            elif messages:
                self._report([], self.engine.stats())

    def _save_until_message(self) -> None:
        """Save the prefix cache to disk, as long as no message arrives."""
        while self.engine.save_idle() and not self.channel.wait_readable(IDLE_WAIT):
            pass

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit(request=request):
                request = self._kept.with_known(request)
                self._kept.note(request.images)
                try:
                    self.engine.add(request)
                except RequestError as error:
                    kind = type(error).__name__
                    self._refusals.append(wire.Refusal(request.id, kind, error.message, error.param))
            case wire.Abort(request_id=request_id):
                self.engine.abort(request_id)
            case wire.LoadAdapter(name=name, path=path):
                self._load_adapter(name, path)
            case wire.UnloadAdapter(name=name):
                if name in self.engine.adapters:
                    self.engine.adapters.unload(name)
                self.channel.send(wire.AdapterDone(self.generation, name))
            case wire.Sleep():
                self._answer_sleep(True, self.engine.sleep)
            case wire.Wake(parts=woken):
                self._answer_sleep(False, functools.partial(self.engine.wake, woken))
            case wire.Settle(clears_cache=clears_cache):
                if clears_cache:
                    self.engine.clear_cache()
                self.channel.send(wire.Settled(self.generation))
            case wire.OrderSessions(order=session_order):
                report = self.engine.order_sessions(session_order)
                self.channel.send(wire.SessionsDone(self.generation, report))
            case wire.OrderWeights(order=order):
                self._order_weights(order)
            case wire.Stop():
                self._stopped = True
            case wire.Pace(steps=steps):
                self._steps_left = steps
            case wire.Ping(wants_view=wants_view):
                # It is answered by the report that follows every batch of messages.
                self._wants_view |= wants_view
            case wire.Start():
                pass

    def _load_adapter(self, name: str, path: str) -> None:
        error = ""
        try:
            self.engine.adapters.load(name, path)
        except CheckpointError as found:
            error = str(found)
        self.channel.send(wire.AdapterDone(self.generation, name, error))

    def _order_weights(self, order: WeightOrder) -> None:
        error, is_busy, checksums = "", False, dict[str, str]()
        try:
            if isinstance(order, ChecksumWeights):
                checksums = self.engine.checksums()
            else:
                is_busy = self.engine.order_weights(order)
        except CheckpointError as found:
            error = str(found)
        self.channel.send(wire.WeightsDone(self.generation, error, is_busy, checksums))

    def _answer_sleep(self, is_asleep: bool, change: Callable[[], None]) -> None:
        error = ""
        try:
            change()
        except CANCELLATIONS:
            raise
        except BaseException as found:  # the front process then ends this one
            error = str(found) or type(found).__name__
        self.channel.send(wire.SleepDone(self.generation, is_asleep, error))

    def _step(self) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
        outputs = self.engine.step()
        stats = self.engine.stats()
        progress = (stats.num_steps, stats.num_faults)
        if outputs or self._refusals or progress != self._progress:
            self._progress = progress
            self._report(outputs, stats)
        else:
            # Send no report, so that the supervisor detects an engine without progress as hanging.
            self.channel.wait_readable(IDLE_WAIT)

    def _report(self, outputs: list[Output], stats: EngineStats) -> None:
        refusals, self._refusals = self._refusals, []
        events, kv_events = self.engine.take_events(), self.engine.take_kv_events()
        view = self.engine.cache_view() if self._wants_view else None
        self._wants_view = False
        self.channel.send(wire.StepDone(self.generation, outputs, stats, refusals, events, kv_events, view))


def main(build: Build | None = None) -> NoReturn:
    """Run an engine process; ``build`` is ``octavo.build.build_engine.build_engine`` unless a test passes its own."""
    code = _serve(build)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, which would wait for threads that compile kernels, or abort.
    os._exit(code)


def _serve(build: Build | None) -> int:
    _settle_signals()
    channel = EngineChannel(socket.socket(fileno=int(sys.argv[-1])))
    try:
        start = channel.receive(wait=True)[0]
        if not isinstance(start, wire.Start):
            raise wire.FrameError(f"the first message must be Start, not {type(start).__name__}")
        log_to_stderr(start.log_level, start.log_format)
        built = _build(build, start, channel)
        if built is None:
            return 1
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            EngineLoop(built, channel, start.generation).run()
        finally:
            built.close()
    except FrontGone:
        logger.info("the front process is gone")
    except (RanksLost, WorkerLost) as error:
        logger.error("%s", error)
        return 1
    return 0


def _build(build: Build | None, start: wire.Start, channel: EngineChannel) -> EngineLike | None:
    """Build the engine and send ``Ready``; on failure send ``BuildFailed`` and return ``None``."""
    try:
        config = _config(start)
        engine, info = (build or _default_build(config.model, start.expects_grammars))(config)
    except CANCELLATIONS:
        raise
    except BaseException as error:
        message = str(error)
        if not isinstance(error, OctavoError):
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
        channel.send(wire.BuildFailed(start.generation, type(error).__name__, message))
        return None
    leave_out_what_exists()
    channel.send(wire.Ready(start.generation, info))
    return engine


def _config(start: wire.Start) -> EngineConfig:
    """The settings of this process. After a restart, requests wait: nothing is measured, and the warm-up is quick."""
    config = EngineConfig.from_flat(start.config)
    if start.generation == 1:
        return config
    model = dataclasses.replace(config.model, kernel_tuning_seconds=0.0, warmup=QUICK)
    return dataclasses.replace(config, model=model)


def _default_build(settings: ModelSettings, expects_grammars: bool) -> Build:
    """The function that builds the backend of the settings. Those without a model need no torch."""
    if settings.backend in parts(ENGINE_BACKENDS):
        backend: EngineBackend = load(ENGINE_BACKENDS, settings.backend)
        return functools.partial(backend.build, on_lost=_end_as)
    phases = Phases()
    count = settings.ranks_per_node - 1  # they import meanwhile
    started = RankProcesses(count) if settings.num_ranks > 1 and hasattr(os, "memfd_create") else None
    prepare_if_there_may_be_a_gpu(settings.device)
    with importing():
        from octavo.build.build_engine import build_engine  # imports torch, which the front process must never import
    phases.done("imports of the engine process")
    return functools.partial(build_engine, on_lost=_end_as, started=started, expects_grammars=expects_grammars)


def _end_as(status: int) -> None:
    """End this process as a rank of its engine ended, by the same signal or with its exit status.

    The supervisor then judges the requests as if this process had been the one.
    """
    sys.stderr.flush()
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(max(status, 1))


def _settle_signals() -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        # Takes effect also during a long step or start, when the socket is not read.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
