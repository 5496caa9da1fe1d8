"""The outermost ASGI middleware: normalises paths, assigns request ids, checks headers and keys, handles exceptions.

Only the paths in ``OPEN_PATHS`` are exempt from the checks of API key and host name, and the console's files from that
of the key. The checked path is the one that
the router uses, so the two cannot disagree.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import CANCELLATIONS, RequestError
from octavo.telemetry.metrics import Metrics
from octavo_server.generation import ClientGone
from octavo_server.http.access_log import log_access
from octavo_server.http.allowed_hosts import AllowedHosts, AllowedOrigins
from octavo_server.http.errors import ErrorForm, HTTPRefusal, UnexpectedError, error_response, rejection_of
from octavo_server.http.pacing import RequestPacer
from octavo_server.http.server import WRITE_PIECE
from octavo_server.observe.tracing import TRACE_HEADERS
from octavo_server.tenants.api_keys import CALLER, Caller, Keys

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Health probes have no key, and often use the address as the host name."""
SINGLE_HEADERS = frozenset(
    (
        *(b"host", b"origin", b"sec-fetch-site", b"authorization", b"x-api-key", b"content-type", b"content-length"),
        *(b"content-encoding", b"idempotency-key", b"last-event-id"),
    )
)
"""Headers that a request may have once: a proxy before this server may go by the first of two, and it by the last."""
MAX_REQUEST_ID_BYTES = 128
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before the response; used in the log and the metrics."""

logger = logging.getLogger(__name__)


class RequestMiddleware:
    """ASGI middleware around the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        hosts: AllowedHosts,
        origins: AllowedOrigins,
        metrics: Metrics,
        is_logged: bool,
        is_traced: bool,
        error_forms: tuple[ErrorForm, ...] = (),
        is_open: Callable[[str, str], bool] | None = None,
    ) -> None:
        """``is_open`` says of a method and a path whether they need no API key; by default, none is without."""
        self.app = app
        self._is_open = is_open or (lambda method, path: False)
        self._error_forms = error_forms
        self._metrics = metrics
        self._keys = keys
        self._hosts = hosts
        self._origins = origins
        self._is_logged = is_logged
        self._is_traced = is_traced
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
        if self._is_traced:
            TRACE_HEADERS.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        try:
            self._check(scope, headers)
            caller: Caller = scope.get(CALLER) or Caller()
            await self._pacer.enter(caller.name)
            await self.app(scope, receive, send_named)
        except (ClientGone, ClientDisconnect):
            logger.debug("%s: the client left", request_id)
            status = status or CLIENT_CLOSED_REQUEST
        except RequestError as error:
            self._metrics.observe_rejection(rejection_of(error))
            await error_response(error, scope["path"], self._error_forms)(scope, receive, send_named)
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("%s: unexpected error", request_id)
            if not status:
                await error_response(UnexpectedError(), scope["path"], self._error_forms)(scope, receive, send_named)
        scope.pop(WRITE_PIECE, None)  # breaks a reference cycle: it refers to the connection, which refers to the scope
        # The route's pattern, not the path: clients must not be able to create metric labels.
        handler = getattr(scope.get("route"), "path", "other")
        seconds = time.monotonic() - start
        self._metrics.observe_http(handler, scope["method"], status, seconds)
        if self._is_logged:
            log_access(scope, status, seconds, request_id)

    def _check(self, scope: Scope, headers: Headers) -> None:
        _check_single(scope["headers"])
        if scope["path"] in OPEN_PATHS:
            return
        self._hosts.check(headers)
        self._origins.check(scope["method"], headers)
        if not self._is_open(scope["method"], scope["path"]):
            scope[CALLER] = self._keys.check(scope["path"], _secret(headers))


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ``HTTPRefusal`` for a header of ``SINGLE_HEADERS`` that the request has twice."""
    names = [name for name, _ in headers if name in SINGLE_HEADERS]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1).decode()
        raise HTTPRefusal(400, f"The request has the header '{twice}' more than once.", "duplicate_header")


def _tidy(path: str) -> str:
    """``path`` without doubled or trailing slashes, which result from base URLs with an extra slash."""
    if "//" in path or path.endswith("/"):
        return "/" + "/".join(filter(None, path.split("/")))
    return path


def _secret(headers: Headers) -> bytes | None:
    """The API key from ``Authorization: Bearer`` (OpenAI) or ``x-api-key`` (Anthropic)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("x-api-key", "")
    # Header values were decoded as Latin-1; encoding restores the original bytes.
    return key.strip().encode("latin-1") or None


def _request_id(headers: Headers) -> str:
    """The client's ``x-request-id`` if it is safe to echo, else a new one."""
    given = headers.get("x-request-id", "")
    if 1 <= len(given) <= MAX_REQUEST_ID_BYTES and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
