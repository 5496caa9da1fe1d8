"""An application in front of a real engine in a thread."""

from __future__ import annotations

from pathlib import Path

from octavo.config import ServeConfig
from octavo.text.tokenizer import load_tokenizer
from octavo_server.app import create_app
from octavo_server.engines.async_engine import AsyncEngine
from tests.server.conftest import AppServer
from tests.server.forked_engine import THREADED


class ThreadedServer(AppServer):
    """Until ``stop``."""

    def __init__(self, config: ServeConfig) -> None:
        self.engine = AsyncEngine(config, THREADED)
        super().__init__(create_app(config, self.engine, load_tokenizer(Path(config.model.model))), config.server)

    async def _serve(self) -> None:
        await self.engine.start()
        await super()._serve()
        await self.engine.stop(0)
