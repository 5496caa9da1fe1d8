"""What both clients know of the protocol, without input or output: URLs, errors, events of a stream, retries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from octavo.errors import (
    AuthenticationError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidParameter,
    ModelNotFound,
    QueueFull,
    RequestError,
    RequestFailed,
    RequestTooLarge,
    Unavailable,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HEALTH = "/health"

CONNECT_SECONDS = 10.0
MAX_TIMEOUT = 1e9
"""Seconds; sockets cannot wait for much longer."""
RETRIED = (429, 503)
"""Statuses after which a request is sent again: it was refused before anything was computed."""
FIRST_PAUSE = 0.5
MAX_PAUSE = 30.0
"""Seconds before a retry: without a ``Retry-After`` header they double from the first pause."""
MAX_ASKED_PAUSE = 600
"""Seconds; a server that asks for more is not waited for."""
MAX_MESSAGE = 2000
"""Characters of a server's message that are kept."""
MAX_BODY_BYTES = 64 << 20
MAX_EVENT_BYTES = 16 << 20
MAX_REFUSAL_BYTES = 64 << 10
"""How much of an answer, an event of a stream, and an explanation of a refusal is read: a server may send anything."""

_BY_CODE: dict[Any, type[RequestError]] = {
    kind.code: kind for kind in (ContextLengthExceeded, ModelNotFound, InvalidParameter)
}
_BY_STATUS: dict[int, type[RequestError]] = {
    kind.status: kind
    for kind in (*(AuthenticationError, RequestTooLarge, QueueFull), *(RequestFailed, Unavailable, DeadlineExceeded))
}


def check_options(url: Any, api_key: Any, timeout: Any, max_retries: Any) -> None:
    """Raise ``InvalidParameter`` for an argument of a client that cannot work."""
    if not _is_http(url):
        raise InvalidParameter("base_url", "'base_url' must be an address that begins with http:// or https://.")
    if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
        raise InvalidParameter("api_key", "'api_key' must be text of printable ASCII characters.")
    if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout <= MAX_TIMEOUT):
        allowed = f"a number of seconds above 0 and at most {MAX_TIMEOUT:g}, or None"
        raise InvalidParameter("timeout", f"'timeout' must be {allowed}.")
    if type(max_retries) is not int or max_retries < 0:
        raise InvalidParameter("max_retries", "'max_retries' must be a whole number from 0.")


def _is_http(url: Any) -> bool:
    try:
        parsed = httpx.URL(url)
    except (TypeError, ValueError, httpx.InvalidURL):
        return False
    return isinstance(url, str) and parsed.scheme in ("http", "https") and bool(parsed.host)


def check_open(client: httpx.Client | httpx.AsyncClient) -> None:
    """Raise ``Unavailable`` if ``client`` is closed."""
    if client.is_closed:
        raise Unavailable("This client is closed.")


def base_of(url: str) -> str:
    """The address of the server at ``url``, which may end with ``/v1`` as other clients' do."""
    return url.rstrip("/").removesuffix("/v1")


def client_options(url: str, api_key: str | None, timeout: float | None) -> dict[str, Any]:
    """Arguments of ``httpx.Client``; ``timeout`` is in seconds without a byte from the server."""
    return {
        "headers": {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",  # what is sent is what has to be kept
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        },
        "follow_redirects": False,
        "timeout": httpx.Timeout(CONNECT_SECONDS, read=timeout),
        # Reading the certificates takes longer than a short request, and plain HTTP has none to verify.
        "verify": not url.startswith("http://"),
    }


def body_of(fields: Mapping[str, Any], model: str | None, streams: bool) -> bytes:
    """The body of a request; ``model`` unless the fields have another. Raises ``InvalidParameter``."""
    if fields.get("stream", streams) is not streams:
        message = "'stream' is the method's choice: generate and chat do not stream, stream and stream_chat do."
        raise InvalidParameter("stream", message)
    body = {**({} if model is None else {"model": model}), **fields, **({"stream": True} if streams else {})}
    return b"{%b}" % b",".join(json.dumps(name).encode() + b":" + _encoded(name, body[name]) for name in body)


def _encoded(name: str, value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it has an unpaired surrogate" if isinstance(error, UnicodeEncodeError) else error
        raise InvalidParameter(name, f"'{name}' cannot be sent as JSON: {reason}.") from None


def pause_before_retry(attempt: int, status: int | None, headers: Mapping[str, str]) -> float | None:
    """Seconds to wait before the next attempt, after ``attempt`` from 0; ``None``: not to be retried.

    ``status`` is ``None`` when there was no connection.
    """
    if (status is not None and status not in RETRIED) or headers.get("x-should-retry") == "false":
        return None
    asked = _retry_after(headers)
    if asked is not None:
        return asked if asked <= MAX_ASKED_PAUSE else None
    return min(FIRST_PAUSE * 2.0**attempt, MAX_PAUSE)


def _retry_after(headers: Mapping[str, str]) -> int | None:
    text = headers.get("retry-after", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def json_of(data: bytes) -> Any:
    """The content of a body; of a longer one, more than ``MAX_BODY_BYTES`` were read. Raises ``RequestError``."""
    if len(data) > MAX_BODY_BYTES:
        raise RequestFailed(f"the server's answer is longer than {MAX_BODY_BYTES >> 20} MiB.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Unavailable("the server's answer is not JSON.") from None


def refusal(status: int, body: bytes, headers: Mapping[str, str]) -> RequestError:
    """The error of a response that is not 200."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body[:200].decode("utf-8", "replace").strip() or "no explanation"
    details = found.get("error") if isinstance(found, dict) else None
    details = details if isinstance(details, dict) else {}
    kind = _BY_CODE.get(str(details.get("code"))) or _BY_STATUS.get(status, RequestError)
    error = kind.__new__(kind)  # the kinds' own constructors write other messages
    RequestError.__init__(
        error,
        f"the server answered {status}: {message_of(found)}",
        param=details.get("param"),
        retry_after=_retry_after(headers),
    )
    error.status = status
    return error


def unreachable(base: str, error: Exception) -> Unavailable:
    """The error of a request that got no response."""
    reason = str(error).partition("] ")[2] or error or type(error).__name__  # without "[Errno 111] "
    if isinstance(error, httpx.ConnectError):
        return Unavailable(f"No server can be reached at {base}: {reason}")
    return Unavailable(f"{base}: {reason}")


def model_names(body: Any) -> list[str]:
    """The ids in the answer of ``/v1/models``; empty if it has another form."""
    try:
        return [str(model["id"]) for model in body["data"]]
    except (LookupError, TypeError):
        return []


class EventReader:
    """Reads the JSON events of a stream, which must end with ``[DONE]``.

    Lines are split at line feeds only: text inside an event may hold other characters that Unicode treats as line ends.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False
        """Whether the end marker was read."""

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """The events that ``chunk`` completes; raises ``RequestFailed`` for an error in the stream."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise RequestFailed(f"the server sent an event of more than {MAX_EVENT_BYTES >> 20} MiB.")
        events = []
        for line in lines:
            if self.is_done or not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.is_done = True
                continue
            events.append(_event(data))
        return events

    def end(self) -> None:
        """Raise ``RequestFailed`` unless the stream is complete."""
        if not self.is_done:
            raise RequestFailed("the server ended the stream before the answer was complete.")


def raise_if_error(event: Mapping[str, Any]) -> None:
    """Raise ``RequestFailed`` for an event that reports an error."""
    if "error" in event:
        raise RequestFailed(message_of(event))


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise RequestFailed(f"the server sent an event that is not JSON: {data[:80]!r}")
    return event


def message_of(body: Any) -> str:
    """The message of an OpenAI error object, or of a similar body that some servers send instead."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = str(error.get("message", error) if isinstance(error, dict) else error)
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
