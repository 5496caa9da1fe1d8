"""Keeps one engine process running.

An engine process that dies is replaced at once. One that sent no message for ``hang_timeout`` seconds is killed and
replaced: a busy engine reports every step, an idle one answers pings. One that starts must use processor time instead.
Consecutive engine processes that delivered no output are separated by an exponential backoff of at most
``LONGEST_PAUSE`` seconds.

After the first successful start no failure is permanent: restarts are retried indefinitely. The first start fails with
the first error that the engine process reports (of the configuration or the checkpoint) or with its first crash; if the
process was killed from outside or could not be created, the start is tried up to ``MAX_FIRST_STARTS`` times.
The supervisor does not handle requests: its owner resubmits them in ``on_up``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.backend_settings import is_honoured
from octavo.config import EngineConfig, ServeConfig, to_flat
from octavo.errors import CANCELLATIONS, OctavoError
from octavo.system.process_exit import processor_time
from octavo.types import MEMORY_PARTS, EngineInfo, MemoryPart
from octavo_server.engines import wire
from octavo_server.engines.engine_link import EngineLink

NUM_RESERVED = 8
"""Starting a process takes a socket pair and the ends of two pipes."""


class DescriptorReserve:
    """File descriptors held open so that connections cannot use them."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def fill(self) -> None:
        """Reopen missing descriptors, as far as available."""
        with contextlib.suppress(OSError):
            while len(self._held) < NUM_RESERVED:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free the reserve within a block. The block must not await, or another task could take the descriptors."""
        self.close()
        try:
            yield
        finally:
            self.fill()


MAX_FIRST_STARTS = 5
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
YOUNG_SECONDS = 60.0
EXIT_SECONDS = 1.0
"""How long to wait for the exit of a process that closed its socket, to learn its exit status before killing it."""
KILL_SECONDS = 10.0
"""How long to wait for the exit of a killed process before starting the next one anyway."""
SLEEP_SECONDS = 60.0
"""How long an engine process may take to free its memory; at its first sleep it may still compile kernels."""
WATCH_SECONDS = 1.0
"""Longest interval between pings."""

logger = logging.getLogger("octavo.server")


class EngineOwner(Protocol):
    """Receives events of the engine process."""

    expects_grammars: bool
    """Whether the next engine process shall prepare for grammars while it starts."""

    async def prepare(self, link: EngineLink) -> None:
        """Prepare a built engine process for requests. Raises ``OctavoError`` on failure."""
        ...

    def on_up(self, info: EngineInfo) -> None: ...
    def on_step(self, step: wire.StepDone) -> None: ...
    def on_down(self, is_from_outside: bool) -> None: ...
    def on_failed_restart(self, reason: str, count: int) -> None:
        """``count`` attempts in a row to start the next engine process failed, the last for ``reason``."""
        ...


class Supervisor:
    """Starts the engine process, detects its death or hang, and starts the next."""

    def __init__(
        self,
        argv: Sequence[str],
        config: dict[str, Any],
        hang_timeout: float,
        owner: EngineOwner,
        environment: Mapping[str, str],
    ) -> None:
        self.link: EngineLink | None = None
        """The current engine process, ready or not; ``None`` before the first and after a ``sleep``
        that ended it."""
        self.is_asleep = False
        """Whether it has freed its memory, and has not been told to wake as a whole."""
        self.num_hangs = 0
        self.generation = 0
        self._argv = argv
        self._config = config
        self._hang_timeout = hang_timeout
        self._owner = owner
        self._environment = environment
        self._reserve = DescriptorReserve()
        self._fruitless = 0
        self._start_seconds = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the first engine process; raise ``OctavoError`` when it cannot be started."""
        for count in itertools.count(1):
            began = time.monotonic()
            try:
                await self._start_next(None)
                break
            except (OctavoError, OSError) as error:
                may_pass = isinstance(error, OSError) or self.link is None or self.link.is_ended_from_outside
                if not may_pass or count == MAX_FIRST_STARTS:
                    raise OctavoError(str(error)) if isinstance(error, OSError) else error from None
                logger.error("starting the engine failed and is tried again: %s", error)
                self._fruitless += 1
                await self._pause()
        self._fruitless = 0
        self._start_seconds = time.monotonic() - began
        logger.info("the engine process is ready after %.2f s", self._start_seconds)
        self._tasks = [asyncio.create_task(self._keep_running()), asyncio.create_task(self._watch())]

    async def stop(self, grace: float) -> None:
        """Ask the engine process to end; kill it after ``grace`` seconds."""
        await self._end(grace)
        self._reserve.close()

    async def sleep(self, grace: float, keeps_process: bool = False) -> bool:
        """End the engine process as ``stop`` does, or the attempts to start one, until ``wake``.

        With ``keeps_process`` one that is ready only frees its memory, if it can. Returns whether there is a process.
        """
        if keeps_process and self.link is not None and self.link.is_ready:
            await self._end_tasks()
            try:
                error = await asyncio.wait_for(self.link.change_sleep(wire.Sleep(self.generation)), SLEEP_SECONDS)
            except TimeoutError:
                error = f"it is not asleep after {SLEEP_SECONDS:g} s"
            if not error:
                self.is_asleep = True
                return True
            logger.warning("the engine process ends instead of sleeping: %s", error)
        await self._end(grace)
        self.link, self.is_asleep = None, False
        return False

    async def wake_part(self, parts: Collection[MemoryPart]) -> bool:
        """Wake a part of a process that sleeps; return whether there is one, and it did. Else ``wake`` starts one."""
        if self.link is None or not self.is_asleep:
            return False
        return not await self.link.change_sleep(wire.Wake(self.generation, [*parts]))

    def wake(self) -> None:
        """Wake the engine process after ``sleep``, or start one, with retries until one is ready."""
        if self._tasks:
            return  # one that was started since then has died, and the next one is being started
        self._fruitless = 0
        self._tasks = [asyncio.create_task(self._wake()), asyncio.create_task(self._watch())]

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _end(self, grace: float) -> None:
        await self._end_tasks()
        link = self.link
        if link is None:
            return
        link.send(wire.Stop(link.generation))
        if not await link.wait_exit(grace):
            logger.warning("engine process %s does not end when asked and is killed", link.pid)
            link.kill()
            await link.wait_exit(KILL_SECONDS)
        link.disconnect()

    async def _wake(self) -> None:
        link, is_asleep, self.is_asleep = self.link, self.is_asleep, False
        if link is None or not is_asleep or not await self._wake_process(link):
            await self._restart()
        await self._keep_running()

    async def _wake_process(self, link: EngineLink) -> bool:
        """Wake a process that sleeps; return whether it is awake. If not, it is gone."""
        error = await link.change_sleep(wire.Wake(link.generation, [*MEMORY_PARTS]))
        if not error:
            self._owner.on_up(await link.ready)
            return True
        logger.error("engine process %s does not wake: %s", link.pid, error)
        link.kill()
        await self._reap(link)
        self._owner.on_down(True)
        return False

    async def _start_next(self, seconds: float | None) -> None:
        """Start an engine process and hand it to the owner; it must be ready within ``seconds``.

        A process that fails is reaped before this raises ``OctavoError``, ``OSError`` or ``TimeoutError``.
        """
        self.generation += 1
        link = self.link = EngineLink(self.generation, self._owner.on_step)
        try:
            with self._reserve.lent():
                link.start_process(self._argv, self._environment)
            await link.connect(self._config, self._owner.expects_grammars)
            info = await self._until_ready(link, seconds)
            await self._owner.prepare(link)
            self._owner.on_up(info)
        except BaseException:
            await self._reap(link)
            raise

    async def _until_ready(self, link: EngineLink, seconds: float | None) -> EngineInfo:
        """Wait until a process is ready: for ``seconds``, and as long as it uses processor time.

        Raises ``OctavoError`` or ``TimeoutError``. Loading may take any time, but never none of a processor.
        """
        assert link.pid is not None
        interval = min(WATCH_SECONDS, self._hang_timeout / 4)
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        used, idle_seconds = processor_time(link.pid), 0.0
        while not (await asyncio.wait([link.ready], timeout=interval))[0]:
            before, used = used, processor_time(link.pid)
            # Looks are counted, not the time between them: this process may have been stopped, too.
            idle_seconds = 0.0 if used is None or used != before else idle_seconds + interval
            if idle_seconds > self._hang_timeout:
                raise TimeoutError(f"it used no processor time for {self._hang_timeout:g} s")
            if time.monotonic() > deadline:
                raise TimeoutError("it did not become ready in time")
        return link.ready.result()

    async def _reap(self, link: EngineLink) -> None:
        """Make sure that an engine process that failed or closed its socket has exited; kill it if needed."""
        if link.closed.is_set() and await link.wait_exit(EXIT_SECONDS):
            logger.error("engine process %s is gone (%s)", link.pid, link.describe_exit())
            return
        link.kill()
        if not await link.wait_exit(KILL_SECONDS):
            logger.error("engine process %s was killed but does not go away", link.pid)

    async def _keep_running(self) -> None:
        while True:
            try:
                await self._wait_for_end()
            except CANCELLATIONS:
                raise
            except BaseException:
                logger.exception("the end of an engine process was not handled")
            await self._restart()

    async def _wait_for_end(self) -> None:
        """Wait until the current engine process ends, reap it and notify the owner."""
        link = self.link
        assert link is not None
        await link.closed.wait()
        await self._reap(link)
        was_useful = link.has_delivered or time.monotonic() - link.started > YOUNG_SECONDS
        self._fruitless = 0 if was_useful else self._fruitless + 1
        self._owner.on_down(link.is_ended_from_outside)

    async def _restart(self) -> None:
        """Start the next engine process, with retries until one is ready."""
        for count in itertools.count(1):
            await self._pause()
            try:
                # A start takes longer than a step, so the timeout scales with the first start's duration.
                await self._start_next((self._hang_timeout + 3 * self._start_seconds) * count)
            except CANCELLATIONS:
                raise
            except BaseException as error:
                is_known = isinstance(error, OctavoError | OSError | TimeoutError)
                reason = str(error)
                logger.error("restarting the engine failed: %s", reason, exc_info=not is_known)
                self._fruitless += 1
                self._owner.on_failed_restart(reason, count)
            else:
                assert self.link is not None
                logger.info("engine process %s is up as generation %s", self.link.pid, self.link.generation)
                return

    async def _pause(self) -> None:
        if self._fruitless:
            await asyncio.sleep(min(FIRST_PAUSE * 2 ** min(self._fruitless - 1, 10), LONGEST_PAUSE))

    async def _watch(self) -> None:
        """Periodically check that the engine process lives and responds; ping it when it does."""
        interval = min(WATCH_SECONDS, self._hang_timeout / 4)
        last_sign, silent_seconds = 0.0, 0.0
        while True:
            await asyncio.sleep(interval)
            self._reserve.fill()
            link = self.link
            if link is None or not link.is_ready:
                continue
            # Looks are counted, as for a start: what came while this process was stopped is read after the first one.
            silent_seconds = silent_seconds + interval if link.last_sign == last_sign else 0.0
            last_sign = link.last_sign
            if link.has_exited():
                # A child of the engine process may still hold the socket open.
                link.disconnect()
            elif silent_seconds >= self._hang_timeout:
                logger.error("nothing heard from engine process %s for %g s", link.pid, self._hang_timeout)
                self.num_hangs += 1
                link.kill()
            else:
                link.send(wire.Ping(link.generation))


def engine_settings(config: ServeConfig) -> dict[str, Any]:
    """Flat ``EngineConfig``. Folders of weight updates need have neither configuration nor tokenizer, where the backend
    can read those of another folder."""
    model, settings = config.model, to_flat(config, EngineConfig)
    if config.server.weight_updates_dir is not None:
        for name in ("hf_config_path", "tokenizer"):
            has_own = name == "tokenizer" or Path(model.model).is_dir()  # a GGUF file has no config.json
            if settings[name] is None and has_own and is_honoured(model.backend, name):
                settings[name] = model.model
    return settings
