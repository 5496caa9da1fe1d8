"""Everything Octavo raises on purpose.

    OctavoError
      + ConfigError            a setting, or a combination of settings, that cannot work
      + CheckpointError        a model file or folder that cannot be loaded
      + RequestError           the client's mistake, or a refusal; carries the whole API error
      |   - InvalidParameter        400
      |   - ContextLengthExceeded   400
      |   - AuthenticationError     401
      |   - ModelNotFound           404
      |   - RequestTooLarge         413
      |   - QueueFull               429, with Retry-After
      |   - Unavailable             503, with Retry-After
      |   - DeadlineExceeded        504, the time that the client gave is over
      |   - RequestFailed           500, the engine could not finish this one request
      + RunnerError            a forward pass failed; the engine isolates who caused it

A ``RequestError`` knows its HTTP status, its OpenAI ``type`` and ``code`` and the parameter it is
about, so the server, the offline API and the tests all speak of one failure with one object.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(OctavoError, ValueError):
    """A setting, or a combination of settings, that cannot work. The message says what to change."""


class CheckpointError(OctavoError, ValueError):
    """A checkpoint that cannot be loaded. The message names the file and the tensor or key."""


class RunnerError(OctavoError, RuntimeError):
    """A forward pass failed as a whole; no token of its plan was produced."""


class RequestError(OctavoError, ValueError):
    """A request that is refused or ended with an error, in the terms of the OpenAI API.

    ``retry_after`` is in seconds; servers send it as the ``Retry-After`` header.
    """

    status: int = 400
    type: str = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidParameter(RequestError):
    """A field of a request has a value that is not allowed."""

    code = "invalid_value"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param)


class ContextLengthExceeded(RequestError):
    """The prompt, with what it asks for, does not fit the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class RequestTooLarge(RequestError):
    """The body is larger than the server accepts."""

    status = 413
    code = "request_too_large"


class QueueFull(RequestError):
    """Too many requests are waiting already; try again after ``retry_after`` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(RequestError):
    """The server is starting, draining or has no engine right now."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"


class DeadlineExceeded(RequestError):
    """The request was not finished in the time that the client gave it."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request was not finished within its 'timeout' of {seconds:g} s.", param="timeout")


class RequestFailed(RequestError):
    """The engine could not finish this request; other requests are not affected."""

    status = 500
    type = "server_error"
    code = "request_failed"
