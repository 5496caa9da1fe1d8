"""The outermost layer, plain ASGI: paths, request ids, API keys, and the last net under everything.

Nothing but the paths in ``OPEN_PATHS`` is served without a key, when keys are asked for, or under a name that is not
allowed: what is not known to be harmless is closed. The path is the one that the router will use, so there is no
second reading of it.
"""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import RequestError
from octavo.server.allowed_hosts import AllowedHosts
from octavo.server.caller import CALLER
from octavo.server.errors import UnexpectedError, error_response, rejection_of
from octavo.server.generation import ClientGone
from octavo.server.http import WRITE_PIECE
from octavo.server.keys import Keys
from octavo.server.pacing import RequestPacer
from octavo.telemetry.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask, which have no key and often no more than the address as a name."""
MAX_REQUEST_ID_BYTES = 128
CLIENT_CLOSED_REQUEST = 499
"""nginx's status, for the log and the metrics, of a request whose client left before its answer."""

logger = logging.getLogger(__name__)


class RequestMiddleware:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, keys: Keys, hosts: AllowedHosts, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics
        self._keys = keys
        self._hosts = hosts
        self._pacer = RequestPacer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scope["path"] = _tidy(scope["path"])
        request_id = _request_id(headers)
        start = time.monotonic()
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        try:
            self._check(scope, headers)
            await self._pacer.enter()
            await self.app(scope, receive, send_named)
        except (ClientGone, ClientDisconnect):
            logger.debug("%s: the client left", request_id)
            status = status or CLIENT_CLOSED_REQUEST
        except RequestError as error:
            self._metrics.observe_rejection(rejection_of(error))
            await error_response(error, scope["path"])(scope, receive, send_named)
        except Exception:
            logger.exception("%s: unexpected error", request_id)
            if not status:
                await error_response(UnexpectedError(), scope["path"])(scope, receive, send_named)
        scope.pop(WRITE_PIECE, None)  # it leads to the connection, and that to the scope
        # The route's pattern, not the path: labels must not grow with what clients send.
        handler = getattr(scope.get("route"), "path", "other")
        self._metrics.observe_http(handler, scope["method"], status, time.monotonic() - start)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["path"] not in OPEN_PATHS:
            self._hosts.check(headers)
            scope[CALLER] = self._keys.check(scope["path"], _secret(headers))


def _tidy(path: str) -> str:
    """``path`` without doubled slashes and without one at its end: what base addresses with a slash too many make."""
    if "//" in path or path.endswith("/"):
        return "/" + "/".join(filter(None, path.split("/")))
    return path


def _secret(headers: Headers) -> bytes | None:
    """The key that came with a request, as OpenAI's clients send it or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("x-api-key", "")
    # Header values were decoded as Latin-1; encoding them so gives back the bytes that were sent.
    return key.strip().encode("latin-1") or None


def _request_id(headers: Headers) -> str:
    """The client's own id when it is fit to be echoed, else a new one."""
    given = headers.get("x-request-id", "")
    if 1 <= len(given) <= MAX_REQUEST_ID_BYTES and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
