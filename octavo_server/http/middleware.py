"""The outermost ASGI middleware: normalises paths, assigns request ids, checks hosts, origins, headers and keys, starts
requests in turn, handles exceptions, writes the access log.

Only the paths in ``OPEN_PATHS`` are exempt from the checks of API key and host name, and the console's files from that
of the key. The checked path is the one that the router uses, so the two cannot disagree.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import CANCELLATIONS, QueueFull, RequestError, Unavailable
from octavo.server_settings import ServerSettings
from octavo.telemetry.metrics import Metrics
from octavo_server.generation import ClientGone
from octavo_server.http.error_responses import (
    ErrorForm,
    HTTPRefusal,
    UnexpectedError,
    error_response,
    printable,
    rejection_of,
)
from octavo_server.http.server import IS_GONE, WRITE_PIECE
from octavo_server.observe.tracing import TRACE_HEADERS
from octavo_server.tenants.api_keys import CALLER, Caller, Keys
from octavo_server.tenants.turn_queue import TurnQueue

PAUSE = 0.005
"""Seconds between two requests of an API key of which the last one was refused."""


class RequestPacer:
    """Starts at most one request per event loop iteration: API keys in turn, each first come, first served.

    The synchronous start of a request, from its headers until its prompt goes to the tokenizer, takes a fraction of a
    millisecond. Fifty at once would make one long iteration and delay the tokens of all streams.

    A refusal takes nearly as long. A key of which the last request was refused, as it has its share of everything, has
    a turn only once in ``PAUSE``: else, trying again and again, it would need the time of all others.
    """

    def __init__(self) -> None:
        self._waiting: TurnQueue[tuple[asyncio.Future[bool], Callable[[], bool]]] = TurnQueue()
        self._is_taken = False
        """Whether a request was started in this iteration."""
        self._next_turns: dict[str, float] = {}
        """By API key of which the last request was refused: the time of its next turn."""
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, owner: str, is_gone: Callable[[], bool] = lambda: False) -> None:
        """Wait for this request's turn; returns at once without contention.

        ``is_gone`` says whether its client has left. Raises ``ClientDisconnect`` if it has, when its turn comes.
        """
        if not self._is_taken and self._may_go(owner):
            self._is_taken = True
            self._begin(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, (turn, is_gone))
        if not self._is_taken:
            self._rest()
        if not await turn:
            raise ClientDisconnect

    def note(self, owner: str, is_refused: bool) -> None:
        """Take note of whether a request was refused. Those without an API key may be anybody's, and wait for none."""
        if not is_refused:
            self._next_turns.pop(owner, None)
        elif owner:
            self._next_turns.setdefault(owner, asyncio.get_running_loop().time() + PAUSE)

    def _may_go(self, owner: str) -> bool:
        return owner not in self._next_turns or asyncio.get_running_loop().time() >= self._next_turns[owner]

    def _begin(self, owner: str) -> None:
        loop = asyncio.get_running_loop()
        if owner in self._next_turns:
            self._next_turns[owner] = loop.time() + PAUSE
        loop.call_soon(self._turn)

    def _turn(self) -> None:
        while (found := self._waiting.pop(self._may_go)) is not None:
            owner, (turn, is_gone) = found
            if turn.done():  # skip cancelled requests
                continue
            turn.set_result(is_here := not is_gone())
            if is_here:
                self._begin(owner)
            else:
                asyncio.get_running_loop().call_soon(self._turn)
            return
        self._is_taken = False
        self._rest()

    def _rest(self) -> None:
        """Until the next turn of one that waits."""
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if not self._is_taken:
            self._is_taken = True
            self._turn()


LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
"""Names of the host inside its containers. They resolve only there, so no web page can own them."""
LOCAL = LOOPBACK | CONTAINER_NAMES
WITHOUT_EFFECT = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing: any page may send them, and read no response."""
CHANGED_BY_READING = frozenset({"/flush_cache"})
"""Paths that change something by any method, as clients of SGLang send it."""
OTHER_SITES = frozenset({"cross-site", "same-site"})
"""Values of ``Sec-Fetch-Site`` that a browser sends for a page of another origin."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s/@:\[\]]+))(?::\d{1,5})?")


class AllowedHosts:
    """Checks ``Host`` against ``allowed``, a set of lower-case names; ``None`` allows any name.

    A web page can point its own host name at this server's address, so that a browser on the local network sends
    requests and lets the page read the responses (DNS rebinding). Such requests carry the page's name in ``Host``.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.allowed: frozenset[str] | None = LOCAL if settings.host in LOOPBACK else None
        if settings.allowed_hosts is not None:
            names = frozenset(name.strip().lower() for name in settings.allowed_hosts.split(","))
            self.allowed = None if "*" in names else names | LOCAL

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ``HTTPRefusal`` for a name that is not allowed."""
        if self.allowed is None:
            return
        found = _HOST.fullmatch(headers.get("host", "").lower())
        name = (found.group(1) or found.group(2)) if found else ""
        if name.rstrip(".") not in self.allowed:
            raise HTTPRefusal(421, "This server has no such name: see --allowed-hosts.", "host_not_allowed")


class AllowedOrigins:
    """Refuses what a page of another origin makes a browser send, unless ``names`` has its origin or ``*``.

    A page can make a browser send some requests to any server without asking it first: forms, plain text, bodies of no
    type. It cannot read the responses, but the requests have an effect (cross-site request forgery). A browser names
    the page's origin in ``Origin``, and its relation to the server in ``Sec-Fetch-Site``:
    https://www.w3.org/TR/fetch-metadata/. Other clients send neither.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.names = [origin.strip() for origin in (settings.allowed_origins or "").split(",") if origin.strip()]

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raises ``HTTPRefusal`` for a request that may have an effect."""
        if (method in WITHOUT_EFFECT and path not in CHANGED_BY_READING) or "*" in self.names:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "")
        if origin in self.names:
            return
        is_own = origin is None or _is_of(origin.lower(), headers.get("host", "").lower())
        if not is_own or site.lower() in OTHER_SITES:
            what = f"The web page's origin {printable(origin)}" if origin else "The web page's origin"
            message = f"{what} may not use this server: see --allowed-origins."
            raise HTTPRefusal(403, message, "origin_not_allowed")


def _is_of(origin: str, host: str) -> bool:
    """Whether an origin has the host and port of ``Host``. The scheme does not count, as a proxy may terminate TLS."""
    scheme, separator, own = origin.partition("://")
    for port in DEFAULT_PORTS.values():
        host = host.removesuffix(port)
    return bool(separator and host) and own.removesuffix(DEFAULT_PORTS.get(scheme, "/")) == host


OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/health_generate", "/liveness"})
"""Health probes have no key, and often use the address as the host name."""
PROBE_PATHS = OPEN_PATHS | {"/metrics", "/load", "/v1/loads", "/is_sleeping"}
"""Paths that monitoring requests every few seconds; they are logged at level debug."""

access_logger = logging.getLogger("octavo.access")


def log_access(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    """Log an answered request, when its response is complete: neither body nor query string nor headers, so neither
    prompts nor keys. ``status`` is 499 for a client that left before the response began."""
    level = logging.DEBUG if scope["path"] in PROBE_PATHS else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    client, path = (scope.get("client") or ("-",))[0], printable(scope["path"])
    fields = {
        "client": client,
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "request_id": request_id,
    }
    if caller := getattr(scope.get(CALLER), "name", ""):
        fields["key"] = caller
    access_logger.log(
        level,
        "%s %s %s %d %.3f s %s",
        *(client, scope["method"], path, status, seconds, request_id),
        extra={"fields": fields},
    )


SINGLE_HEADERS = frozenset(
    (
        *(b"host", b"origin", b"sec-fetch-site", b"authorization", b"x-api-key", b"x-goog-api-key"),
        *(b"content-type", b"content-length", b"content-encoding", b"idempotency-key", b"last-event-id"),
    )
)
"""Headers that a request may have once: a proxy before this server may go by the first of two, and it by the last."""
GOOGLE_KEY = "x-goog-api-key"
MAX_REQUEST_ID_BYTES = 128
REFUSALS = (QueueFull.status, Unavailable.status)
"""Statuses of a request that may be tried again later."""
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
        is_open: Callable[[str], bool] | None = None,
    ) -> None:
        """``is_open`` says of a path that is read whether that needs no API key; by default, none is without."""
        self.app = app
        self._is_open = is_open or (lambda path: False)
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
        scope["path"] = _tidy(scope["path"], scope["method"], headers)
        request_id = _request_id(headers)
        start = time.monotonic()
        status, owner = 0, ""
        if self._is_traced:
            TRACE_HEADERS.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._pacer.note(owner, status in REFUSALS)
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        try:
            self._check(scope, headers)
            caller: Caller = scope.get(CALLER) or Caller()
            owner = caller.name
            await self._pacer.enter(owner, scope.get(IS_GONE) or bool)
            await self.app(scope, receive, send_named)
        except (ClientGone, ClientDisconnect):
            logger.debug("%s: the client left", request_id)
            status = status or CLIENT_CLOSED_REQUEST
        except RequestError as error:
            self._metrics.observe_rejection(rejection_of(error))
            await error_response(error, scope["path"], self._error_forms)(scope, receive, send_named)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            logger.warning("%s: %s ended by the shutdown", request_id, scope["path"])
            if not status:
                late = Unavailable("The server shut down before this request was finished.")
                await error_response(late, scope["path"], self._error_forms)(scope, receive, send_named)
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("%s: unexpected error", request_id)
            if not status:
                await error_response(UnexpectedError(), scope["path"], self._error_forms)(scope, receive, send_named)
        for name in (WRITE_PIECE, IS_GONE):
            scope.pop(name, None)  # breaks a reference cycle: it refers to the connection, which refers to the scope
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
        self._origins.check(scope["method"], scope["path"], headers)
        if scope["method"] not in ("GET", "HEAD") or not self._is_open(scope["path"]):
            scope[CALLER] = self._keys.check(scope["path"], _secret(scope, headers))


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ``HTTPRefusal`` for a header of ``SINGLE_HEADERS`` that the request has twice."""
    names = [name for name, _ in headers if name in SINGLE_HEADERS]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1).decode()
        raise HTTPRefusal(400, f"The request has the header '{twice}' more than once.", "duplicate_header")


def _tidy(path: str, method: str, headers: Headers) -> str:
    """``path`` without doubled or trailing slashes, which result from base URLs with an extra slash, and without the
    ``/openai`` that Groq's SDK puts in front of ``/v1``. What clients of the Gemini API ask under ``/v1/models`` is
    under ``/v1beta/models``: OpenAI's posts nothing there."""
    if "//" in path or path.endswith("/"):
        path = "/" + "/".join(filter(None, path.split("/")))
    is_google = GOOGLE_KEY in headers or (method == "POST" and path.startswith("/v1/models/"))
    if is_google and path.startswith("/v1/models"):
        return f"/v1beta{path.removeprefix('/v1')}"
    return path.removeprefix("/openai") if path.startswith("/openai/v1/") else path


def _secret(scope: Scope, headers: Headers) -> bytes | None:
    """The API key from ``Authorization: Bearer`` (OpenAI), ``x-api-key`` (Anthropic), or in the Gemini API also
    ``x-goog-api-key`` or the query's ``key``."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("x-api-key") or headers.get(GOOGLE_KEY, "")
    if not key and scope["path"].startswith("/v1beta/"):
        key = QueryParams(scope["query_string"]).get("key", "").encode().decode("latin-1")
    # Header values were decoded as Latin-1; encoding restores the original bytes.
    return key.strip().encode("latin-1") or None


def _request_id(headers: Headers) -> str:
    """The client's ``x-request-id`` if it is safe to echo, else a new one."""
    given = headers.get("x-request-id", "")
    if 1 <= len(given) <= MAX_REQUEST_ID_BYTES and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
