"""What the serving process runs for the openai backend; see ``octavo_server.front.serving.Front``."""

from __future__ import annotations

from starlette.applications import Starlette

from octavo.config import ServeConfig
from octavo_fleet.proxy.app import create_proxy_app
from octavo_fleet.proxy.upstream import Upstream
from octavo_server.front.takeover import Predecessor


class ProxyFront:
    """A proxy and its upstream."""

    def __init__(self, config: ServeConfig) -> None:
        self.engine = Upstream(config)
        self._config = config

    def load(self, predecessor: Predecessor | None) -> Starlette:
        """Build the application."""
        return create_proxy_app(self._config, self.engine)

    def has_request(self, folder: str, owner: str, key: str) -> bool:
        """There is no journal."""
        return False

    async def leave_jobs(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing is left open."""

    def startup_message(self, url: str) -> str:
        """What is printed when the server is ready."""
        return f"Forwarding {url} to {self.engine.url}\nTry:\n  curl {url}/v1/models"
