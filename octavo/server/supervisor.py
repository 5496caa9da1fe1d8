"""Keeps one engine process running.

An engine process that dies is replaced at once. One from which nothing was heard for ``hang_timeout`` seconds
is killed, and then replaced: with work it reports every step, and without work it is asked to report.
Lives that brought no token are followed by a growing pause. After ``MAX_FAILED_STARTS`` lives in a row that
never became ready, or died young without having had a request, the supervisor gives up.
Requests are not its concern: the owner submits them again when told that a new engine is up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from octavo.errors import OctavoError
from octavo.server import wire
from octavo.server.engine_link import EngineLink
from octavo.types import EngineInfo

MAX_FAILED_STARTS = 5
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
YOUNG_SECONDS = 60.0
KILL_SECONDS = 10.0
"""How long a killed process may take to disappear before the next one is started anyway."""
WATCH_SECONDS = 1.0
"""How often an idle engine is asked for a sign of life."""

logger = logging.getLogger("octavo.server")


class Owner(Protocol):
    """Who is told what happens to the engine process."""

    def on_up(self, info: EngineInfo) -> None: ...
    def on_step(self, step: wire.StepDone) -> None: ...
    def on_down(self) -> None: ...
    def on_given_up(self, reason: str) -> None: ...


class Supervisor:
    """Starts the engine process, notices when it died or hangs, and starts the next."""

    def __init__(self, argv: Sequence[str], config: dict[str, Any], hang_timeout: float, owner: Owner) -> None:
        self.link: EngineLink | None = None
        """The engine process of now, ready or not; ``None`` before the first."""
        self.num_hangs = 0
        self.generation = 0
        self._argv = argv
        self._config = config
        self._hang_timeout = hang_timeout
        self._owner = owner
        self._fruitless = 0
        self._failed_starts = 0
        self._start_seconds = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the first engine process; raise why it cannot be started."""
        began = time.monotonic()
        link = await self._launch()
        try:
            info = await link.ready
        except BaseException:
            link.kill()
            await link.wait_exit(KILL_SECONDS)
            raise
        self._start_seconds = time.monotonic() - began
        logger.info("the engine process is ready after %.2f s", self._start_seconds)
        self._owner.on_up(info)
        self._tasks = [asyncio.create_task(self._keep_running()), asyncio.create_task(self._watch())]

    async def stop(self, grace: float) -> None:
        """End the engine process: ask, and kill it when it is still there after ``grace`` seconds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        link = self.link
        if link is None:
            return
        link.send(wire.Stop(link.generation))
        if not await link.wait_exit(grace):
            logger.warning("engine process %s does not end when asked and is killed", link.pid)
            link.kill()
            await link.wait_exit(KILL_SECONDS)
        link.disconnect()

    async def _launch(self) -> EngineLink:
        self.generation += 1
        self.link = EngineLink(self.generation, self._owner.on_step)
        await self.link.open(self._argv, self._config)
        return self.link

    async def _keep_running(self) -> None:
        try:
            while True:
                await self._outlive()
                reason = await self._restart()
                if reason is not None:
                    break
        except Exception as error:
            logger.exception("the supervisor of the engine process failed")
            reason = f"{type(error).__name__}: {error}"
        logger.critical("the engine cannot be kept running: %s", reason)
        self._owner.on_given_up(reason)

    async def _outlive(self) -> None:
        """Wait for the end of the engine process of now, and bury it."""
        link = self.link
        assert link is not None
        await link.closed.wait()
        link.kill()
        if not await link.wait_exit(KILL_SECONDS):
            logger.error("engine process %s was killed but does not go away", link.pid)
        logger.error("engine process %s is gone (%s)", link.pid, link.describe_exit())
        was_useful = link.has_delivered or time.monotonic() - link.started > YOUNG_SECONDS
        self._fruitless = 0 if was_useful else self._fruitless + 1
        self._failed_starts = 0 if was_useful or link.had_requests else self._failed_starts + 1
        self._owner.on_down()

    async def _restart(self) -> str | None:
        """Start the next engine process, trying a few times; return why it cannot be done, or ``None``."""
        reason = "it died without having had a request"
        while self._failed_starts < MAX_FAILED_STARTS:
            if self._fruitless:
                await asyncio.sleep(min(FIRST_PAUSE * 2 ** (self._fruitless - 1), LONGEST_PAUSE))
            link: EngineLink | None = None
            try:
                link = await self._launch()
                # A start is not a step; but one that takes several times as long as the first did will not end.
                info = await asyncio.wait_for(asyncio.shield(link.ready), self._hang_timeout + 3 * self._start_seconds)
            except (OctavoError, OSError, TimeoutError) as error:
                reason = str(error) or "it did not become ready in time"
                logger.error("restarting the engine failed: %s", reason)
                if link is not None:
                    link.kill()
                    await link.wait_exit(KILL_SECONDS)
                self._failed_starts += 1
                self._fruitless += 1
            else:
                logger.warning("engine process %s is up as generation %s", link.pid, link.generation)
                self._owner.on_up(info)
                return None
        return reason

    async def _watch(self) -> None:
        """Look after the engine process at regular times."""
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, self._hang_timeout / 4))
            link = self.link
            if link is None or not link.is_ready:
                continue
            if link.has_exited():
                # Its socket may stay open in a process that it started.
                link.disconnect()
            elif time.monotonic() - link.last_sign > self._hang_timeout:
                logger.error("nothing heard from engine process %s for %g s", link.pid, self._hang_timeout)
                self.num_hangs += 1
                link.kill()
            else:
                link.send(wire.Ping(link.generation))
