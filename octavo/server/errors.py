"""Errors as the OpenAI API words them: one object with four keys, a status and, when it helps, ``Retry-After``.

What a client sees is made here from a ``RequestError`` and from nothing else, so no stack trace, path or ``repr``
of an unexpected exception can reach it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from octavo.errors import (
    AuthenticationError,
    DeadlineExceeded,
    InvalidParameter,
    QueueFull,
    RequestError,
    RequestTooLarge,
    Unavailable,
)

logger = logging.getLogger(__name__)

_REJECTIONS: dict[type[RequestError], str] = {
    QueueFull: "queue_full",
    Unavailable: "unavailable",
    RequestTooLarge: "too_large",
    AuthenticationError: "unauthorized",
}

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

RETRY_AFTER_SECONDS = 1
MAX_SHOWN_LENGTH = 100


class UnsupportedParameter(InvalidParameter):
    """A field that the API defines and this server does not implement asks for something."""

    code = "unsupported_parameter"

    def __init__(self, param: str, message: str | None = None) -> None:
        super().__init__(param, message or f"'{param}' is not supported by this server.")


class UnknownParameter(InvalidParameter):
    """A field that no API defines, on a server that was told to refuse such fields."""

    code = "unknown_parameter"

    def __init__(self, names: Iterable[str]) -> None:
        shown = ", ".join(f"'{printable(name)}'" for name in names)
        super().__init__(shown.partition(",")[0].strip("'"), f"Unknown parameter: {shown}.")


class MissingParameter(InvalidParameter):
    """A required field is absent or null."""

    code = "missing_required_parameter"

    def __init__(self, param: str) -> None:
        super().__init__(param, f"Missing required parameter: '{param}'.")


class NotFound(RequestError):
    """Something that was asked for by its id is not there, or belongs to somebody else."""

    status = 404
    code = "not_found"


class StorageFull(Unavailable):
    """There is no room to keep something. Jobs wait until there is."""

    status = 507
    type = "server_error"
    code = "storage_full"


class StorageUnavailable(Unavailable):
    """The database of what is kept cannot be used."""

    code = "storage_unavailable"


class UnexpectedError(RequestError):
    """Something went wrong that nobody foresaw; the log has the details, the client gets an apology."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request. Sorry about that!")


class HTTPRefusal(RequestError):
    """A request that is refused for its HTTP form: unknown path, wrong method, headers too large, too slow."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def printable(text: str) -> str:
    """Client text as it may be shown in a message, a header or a log: short, and plain visible characters."""
    return "".join(char if " " <= char <= "~" else "?" for char in text[:MAX_SHOWN_LENGTH])


def error_object(error: RequestError) -> dict[str, dict[str, str | None]]:
    """The body of an error answer; all four keys are always there."""
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code},
    }


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The body of an error answer of the Anthropic API, whose types say less than a status does."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: RequestError, path: str = "") -> Response:
    """The answer to a request of ``path`` that is refused or has failed."""
    headers: dict[str, str] = {}
    retry_after = error.retry_after
    if isinstance(error, QueueFull | Unavailable):
        retry_after = retry_after or RETRY_AFTER_SECONDS
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RequestTooLarge):
        # The rest of the body is not wanted, so the connection cannot be used again.
        headers["Connection"] = "close"
    if isinstance(error, DeadlineExceeded):
        # Whoever set the time knows best whether to try again.
        headers["x-should-retry"] = "false"
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    body = msgspec.json.encode(anthropic_error(error) if is_anthropic else error_object(error))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def rejection_of(error: RequestError) -> str:
    """What a refused request counts as in the metrics."""
    for kind, reason in _REJECTIONS.items():
        if isinstance(error, kind):
            return reason
    return "invalid" if error.status < 500 else "other"


async def on_request_error(request: Request, error: Exception) -> Response:
    """The application's handler of ``RequestError``."""
    assert isinstance(error, RequestError)
    request.app.state.services.engine.metrics.observe_rejection(rejection_of(error))
    return error_response(error, request.scope["path"])


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The application's handler of what the router itself refuses: paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": _methods(request)})
    where = f"{printable(request.method)} {printable(request.scope['path'])}"
    if error.status_code == 405:
        refusal = HTTPRefusal(405, f"Invalid method for URL ({where}).", "method_not_allowed")
    else:
        refusal = HTTPRefusal(error.status_code, f"Invalid URL ({where}).", "unknown_url")
    response = error_response(refusal, request.scope["path"])
    if error.status_code == 405:
        response.headers["Allow"] = _methods(request)
    return response


def _methods(request: Request) -> str:
    """All methods of a path: the router itself names only those of the first route with it."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({"OPTIONS", *(method for route in routes for method in route.methods)}))
