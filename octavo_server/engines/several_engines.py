"""What a server of several engine processes has of each of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from octavo.errors import RequestFailed
from octavo.types import DropTensors, JoinGroup, ReceiveTensors
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.engine_client import SleepMode


class SeveralEngines:
    """Engines behind one HTTP server."""

    def __init__(self, engines: list[AsyncEngine]) -> None:
        self.engines = engines
        self._changing_weights = asyncio.Lock()
        self._change: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all engine processes; raises the first one's error."""
        await asyncio.gather(*(engine.start() for engine in self.engines))

    async def stop(self, timeout: float) -> None:
        """Drain all engines, then stop them."""
        await asyncio.gather(*(engine.stop(timeout) for engine in self.engines))

    @property
    def has_received(self) -> bool:
        """Whether tensors were received that ``take_weights`` would take."""
        return any(engine.has_received for engine in self.engines)

    async def order_weights(self, order: JoinGroup | ReceiveTensors | DropTensors) -> None:
        """Have all engines receive weights; their ranks in a group follow each other."""
        orders = [order for _ in self.engines]
        if isinstance(order, JoinGroup):
            orders = [msgspec.structs.replace(order, rank=order.rank + i) for i in range(len(self.engines))]
        await asyncio.gather(*(engine.order_weights(own) for engine, own in zip(self.engines, orders, strict=True)))

    async def weight_checksums(self) -> dict[str, str]:
        """Those of all engines, by their number."""
        every = await asyncio.gather(*(engine.weight_checksums() for engine in self.engines))
        return {f"dp={i}/{name}": digest for i, own in enumerate(every) for name, digest in own.items()}

    async def update_weights(self, model: str, version: str, mode: SleepMode = "keep") -> None:
        """Update all engines, as ``AsyncEngine.update_weights`` does, or none: see ``_change_weights``."""
        await self._change_weights(lambda engine: engine.update_weights(model, version, mode))

    async def take_weights(self, version: str | None, mode: SleepMode = "keep") -> str:
        """Have all engines serve the weights that they received, as ``AsyncEngine.take_weights`` does, or none."""
        version = version or str(1 + max(engine.num_received for engine in self.engines))
        await self._change_weights(lambda engine: engine.take_weights(version, mode))
        return version

    async def _change_weights(self, change: Callable[[AsyncEngine], Awaitable[object]]) -> None:
        """Have all engines change their weights, and wait for all; if only some can, all go back to their folder.

        A caller that is cancelled leaves no engine with other weights: what has begun goes on without it.
        Raises the first error, and ``RequestFailed`` with the versions of all if one cannot go back.
        """
        await self._changing_weights.acquire()
        self._change = asyncio.create_task(self._change_all(change))  # asyncio alone keeps no task from being collected
        self._change.add_done_callback(lambda _: self._changing_weights.release())
        await asyncio.shield(self._change)

    async def _change_all(self, change: Callable[[AsyncEngine], Awaitable[object]]) -> None:
        """``_change_weights`` without the lock."""
        folders = [engine.weights_folder for engine in self.engines]
        errors = await errors_of(change(engine) for engine in self.engines)
        failed = [error for error in errors if error is not None]
        if not failed:
            return
        if len(failed) < len(errors):
            # What an engine keeps of a broadcast has no folder, so those that failed give it up, too.
            back = await errors_of(
                engine.update_weights(*folder)
                for engine, folder, error in zip(self.engines, folders, errors, strict=True)
                if error is None or engine.weight_version != folder[1]
            )
            if any(error is not None for error in back):
                versions = ", ".join(engine.weight_version for engine in self.engines)
                message = f"{failed[0]} The engines now have different weights, which are, in order: {versions}."
                raise RequestFailed(message) from failed[0]
        raise failed[0]

    @property
    def failure(self) -> str | None:
        """Why requests are rejected: no engine process can be started any more."""
        failures = [engine.failure for engine in self.engines]
        return failures[0] if all(failures) else None

    @property
    def is_ready(self) -> bool:
        return any(engine.is_ready for engine in self.engines)

    @property
    def num_live(self) -> int:
        return sum(engine.num_live for engine in self.engines)

    @property
    def live_owners(self) -> Counter[str]:
        """Number of live requests by API key."""
        return sum((engine.live_owners for engine in self.engines), Counter())


async def errors_of(tasks: Iterable[Awaitable[object]]) -> list[BaseException | None]:
    """Wait for all; their errors, in order."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [result if isinstance(result, BaseException) else None for result in results]
