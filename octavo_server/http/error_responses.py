"""Error responses in the OpenAI API's format: an object with four keys, a status and possibly ``Retry-After``.

Error responses are made only from ``RequestError``, so no stack trace, path or ``repr`` of an unexpected exception
can reach a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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

RETRY_AFTER_SECONDS = 1
MAX_SHOWN_LENGTH = 100


class UnsupportedParameter(InvalidParameter):
    """The request uses an API field that this server does not implement."""

    code = "unsupported_parameter"

    def __init__(self, param: str, message: str | None = None) -> None:
        super().__init__(param, message or f"'{param}' is not supported by this server.")


class UnknownParameter(InvalidParameter):
    """A field that no API defines, on a server with ``unknown_fields`` set to "reject"."""

    code = "unknown_parameter"

    def __init__(self, names: Iterable[str]) -> None:
        shown = ", ".join(f"'{printable(name)}'" for name in names)
        super().__init__(shown.partition(",")[0].strip("'"), f"Unknown parameter: {shown}.")


class MissingParameter(InvalidParameter):
    """A required field is absent or null."""

    code = "missing_required_parameter"

    def __init__(self, param: str, message: str = "") -> None:
        super().__init__(param, message or f"Missing required parameter: '{param}'.")


class NotFound(RequestError):
    """No object with this id exists, or it belongs to another API key."""

    status = 404
    code = "not_found"


class StorageFull(Unavailable):
    """The store is full. Background jobs retry until there is room."""

    status = 507
    type = "server_error"
    code = "storage_full"


class StorageUnavailable(Unavailable):
    """The store's database cannot be used at the moment."""

    code = "storage_unavailable"


class Unreadable(RequestError):
    """A stored item is damaged; the log names it. Not ``Unavailable``: trying again does not help."""

    status = 503
    type = "server_error"
    code = "storage_damaged"


class UnexpectedError(RequestError):
    """An unexpected exception; the details are in the log, the client receives a generic message."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request. Sorry about that!")


class HTTPRefusal(RequestError):
    """A request rejected at the HTTP level: unknown path, wrong method, headers too large, timeout."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def printable(text: str) -> str:
    """Client text made safe for messages, headers and logs: truncated, printable ASCII only."""
    return "".join(char if " " <= char <= "~" else "?" for char in text[:MAX_SHOWN_LENGTH])


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of an error response in the OpenAI API's format; all four keys are always present."""
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code},
    }


class ErrorForm(NamedTuple):
    """How the endpoints of an API write errors."""

    name: str
    """In the OpenAPI document."""
    schema: dict[str, Any]
    body: Callable[[RequestError], dict[str, Any]]
    paths: tuple[str, ...] = ()
    """Paths of the API; what is below them is part of it, also where there is no endpoint."""


TEXT = {"type": "string"}
"""A JSON schema."""


def object_of(**members: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object that has all of ``members``."""
    return {"type": "object", "required": list(members), "properties": members}


_OPTIONAL = {"type": ["string", "null"]}
_SCHEMA = object_of(error=object_of(message=TEXT, type=TEXT, param=_OPTIONAL, code=_OPTIONAL))
ERROR = ErrorForm("Error", _SCHEMA, error_object)


def typed_errors(name: str, kinds: tuple[str, str, str], paths: tuple[str, ...]) -> ErrorForm:
    """The errors of Hugging Face's servers: a message and a type, which is one of ``kinds``: too many requests, a
    request that is wrong, and a failure."""

    def body(error: RequestError) -> dict[str, Any]:
        busy, wrong, failed = kinds
        kind = busy if isinstance(error, QueueFull | Unavailable) else wrong if error.status < 500 else failed
        return {"error": error.message, "error_type": kind}

    return ErrorForm(name, object_of(error=TEXT, error_type=TEXT), body, paths)


def _body_of(error: RequestError, path: str, forms: Iterable[ErrorForm]) -> dict[str, Any]:
    """The body of an error response in the format of the API that the path belongs to."""
    for form in forms:
        if any(path == own or path.startswith(f"{own}/") for own in form.paths):
            return form.body(error)
    return error_object(error)


def error_response(error: RequestError, path: str = "", forms: Iterable[ErrorForm] = ()) -> Response:
    """The response to a rejected or failed request to ``path``, in the one of ``forms`` that it belongs to."""
    headers: dict[str, str] = {}
    retry_after = error.retry_after
    if isinstance(error, QueueFull | Unavailable):
        retry_after = retry_after or RETRY_AFTER_SECONDS
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RequestTooLarge):
        # The rest of the body is not read, so the connection cannot be reused.
        headers["Connection"] = "close"
    if isinstance(error, DeadlineExceeded):
        # The client chose the deadline, so its library must not retry automatically.
        headers["x-should-retry"] = "false"
    body = msgspec.json.encode(_body_of(error, path, forms))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def rejection_of(error: RequestError) -> str:
    """The rejection reason used as a metrics label."""
    for kind, reason in _REJECTIONS.items():
        if isinstance(error, kind):
            return reason
    return "invalid" if error.status < 500 else "other"


def _forms_of(request: Request) -> tuple[ErrorForm, ...]:
    """The forms of errors of an application's endpoints, besides ``ERROR``."""
    forms: tuple[ErrorForm, ...] = getattr(request.app.state, "error_forms", ())
    return forms


async def on_request_error(request: Request, error: Exception) -> Response:
    """Exception handler for ``RequestError``."""
    assert isinstance(error, RequestError)
    request.app.state.services.monitored.metrics.observe_rejection(rejection_of(error))
    return error_response(error, request.scope["path"], _forms_of(request))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for unknown paths and methods, raised by the router."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": _methods(request)})
    where = f"{printable(request.method)} {printable(request.scope['path'])}"
    if error.status_code == 405:
        refusal = HTTPRefusal(405, f"Invalid method for URL ({where}).", "method_not_allowed")
    else:
        refusal = HTTPRefusal(error.status_code, f"Invalid URL ({where}).", "unknown_url")
    response = error_response(refusal, request.scope["path"], _forms_of(request))
    if error.status_code == 405:
        response.headers["Allow"] = _methods(request)
    return response


def _methods(request: Request) -> str:
    """All methods of a path; the router reports only those of the first matching route."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({"OPTIONS", *(method for route in routes for method in route.methods)}))
