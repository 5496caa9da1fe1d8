"""A proxy in a thread of the test process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from octavo.config import ServeConfig
from octavo.server.proxy.app import create_proxy_app
from octavo.server.proxy.upstream import Upstream
from tests.server.conftest import AppServer, Served


class Proxy(AppServer):
    """A running proxy to the server at ``url``."""

    def __init__(self, url: str, settings: dict[str, Any] | None = None) -> None:
        config = ServeConfig.from_flat({"backend": "openai", "upstream": url, **(settings or {})})
        self.upstream = Upstream(config)
        super().__init__(create_proxy_app(config, self.upstream), config.server)
        self.run(self.upstream.start())

    def run(self, awaitable: Any) -> Any:
        """Run a coroutine on the proxy's event loop."""
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(30)

    def wait_ready(self, is_ready: bool = True) -> None:
        """Wait until the upstream counts as up, or as down."""
        for _ in range(1000):
            if self.upstream.is_ready == is_ready:
                return
            threading.Event().wait(0.01)
        raise TimeoutError

    def stop(self) -> None:
        self.run(self.upstream.stop(0))
        super().stop()


class ProxiedServed(Proxy):
    """A ``Served`` whose clients go through a proxy; ``app`` and ``engine`` are those behind it."""

    def __init__(self, inner: Served) -> None:
        super().__init__(inner.url)
        self.inner, self.engine, self.app = inner, inner.engine, inner.app

    def call(self, function: Any) -> Any:
        return self.inner.call(function)

    def stop(self) -> None:
        self.run(self.upstream.stop(0))
        self.client.close()
        self.loop.call_soon_threadsafe(self._server.end)
        self._thread.join(10)
        self.inner.stop()
