"""What a server of several engine processes has of each of them."""

from __future__ import annotations

import asyncio
from collections import Counter

from octavo_server.engines.async_engine import AsyncEngine


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
