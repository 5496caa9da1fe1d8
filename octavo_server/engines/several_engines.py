"""What a server of several engine processes has of each of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from octavo.types import DropTensors, JoinGroup, ReceiveTensors
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.engine_client import SleepMode


class SeveralEngines:
    """Engines behind one HTTP server."""

    engines: list[AsyncEngine]

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

    async def take_weights(self, version: str | None, mode: SleepMode = "keep") -> str:
        """Have all engines serve the weights that they received, as ``AsyncEngine.take_weights`` does."""
        return (await asyncio.gather(*(engine.take_weights(version, mode) for engine in self.engines)))[0]

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
