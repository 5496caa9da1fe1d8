"""Run the serving process around an in-process engine: ``python -m tests.server.serve_script FOLDER NAME=VALUE...``.

The engine gives a token every 20 ms, so that there is something to drain.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from octavo.config import ServeConfig
from octavo.errors import Unavailable
from octavo.types import Request
from octavo_server.engines.engine_client import OutputListener
from octavo_server.front import serving
from tests.server.in_process import InProcessEngine


class SlowEngine(InProcessEngine):
    """Starts, steps at a human pace, and drains as ``AsyncEngine`` does; the requests that it has then go on once it
    has refused another one."""

    def __init__(self, config: ServeConfig, argv: list[str] | None) -> None:
        super().__init__()

    async def start(self) -> None:
        print("starting", flush=True)
        await asyncio.sleep(0.2)

    async def stop(self, timeout: float) -> None:
        self.is_draining, self.is_ready, self.runs = True, False, False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self.live and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for live in list(self.live.values()):
            self.abort(live.request.id)
            live.listener.on_error(Unavailable("The server shut down before this request was finished."))

    def add(self, request: Request, listener: OutputListener) -> None:
        self.runs = True
        self._schedule()
        super().add(request, listener)

    def _schedule(self) -> None:
        if self.runs and self.live and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(0.02, self._run)


def main() -> int:
    model, *settings = sys.argv[1:]
    values: dict[str, Any] = dict(setting.split("=") for setting in settings)
    setattr(serving, "AsyncEngine", SlowEngine)  # noqa: B010
    return serving.run(ServeConfig.from_flat({"model": model, "port": 0, **values}))


if __name__ == "__main__":
    sys.exit(main())
