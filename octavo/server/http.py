"""The HTTP server under the application: uvicorn, as this server needs it."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from octavo.config import ServerSettings
from octavo.errors import ConfigError

BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that it is they who close them and no request is lost."""
FLUSH_SECONDS = 2
"""Time for the last bytes of answers to leave after the drain."""


class HTTPServer(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end streams before they are drained."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        logging.getLogger("uvicorn").setLevel("WARNING")
        """Raises ``ConfigError`` for certificates that cannot be read."""
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"ssl_certfile, ssl_keyfile or ssl_ca_certs cannot be read: {error}") from None
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
