"""The exceptions of Octavo.

    OctavoError
      + ConfigError            a setting, or a combination of settings, that cannot work
      + CheckpointError        a model file or folder that cannot be loaded
      + RequestError           an invalid or refused request; carries the API's error object
      |   - InvalidParameter        400
      |   - ContextLengthExceeded   400
      |   - AuthenticationError     401
      |   - ModelNotFound           404
      |   - RequestTooLarge         413
      |   - QueueFull               429, with Retry-After
      |   - Unavailable             503, with Retry-After
      |       - Withdrawn               an operator ended the running requests
      |   - DeadlineExceeded        504, the timeout of the client or of the server expired
      |   - RequestFailed           500, the engine could not finish this request
      + RunnerError            a forward pass failed; the engine isolates the request that caused it
      + RanksLost              a process of a tensor-parallel engine died or hangs; the engine cannot go on
      + WorkerLost             the worker of backend grpc ended or hangs; the engine cannot go on

A ``RequestError`` has its HTTP status, its OpenAI ``type`` and ``code`` and the name of the parameter,
so the server, the offline API and the tests share one object per failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CANCELLATIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends code from outside. All else that is raised is a failure of the code itself, also the panic of a library in
Rust, which is no ``Exception``. So what handles any failure is written

    except CANCELLATIONS:
        raise
    except BaseException as error:

or, where another error takes the place of it, with ``failures_as``."""


@contextlib.contextmanager
def failures_as(make: Callable[[BaseException], Exception], *kept: type[BaseException]) -> Iterator[None]:
    """Raise what ``make`` makes of any failure in this block, as of a library with errors of many kinds; those of the
    kinds ``kept`` stay as they are."""
    try:
        yield
    except CANCELLATIONS:
        raise
    except kept:
        raise
    except BaseException as error:
        raise make(error) from None


def first_line_of(error: BaseException) -> str:
    """The first line of an error's message that has words, or its kind."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


class OctavoError(Exception):
    """Base class of all exceptions of Octavo."""


class ConfigError(OctavoError, ValueError):
    """A setting, or a combination of settings, that cannot work. The message says what to change."""


class CheckpointError(OctavoError, ValueError):
    """A checkpoint that cannot be loaded. The message names the file and the tensor or key."""


class RunnerError(OctavoError, RuntimeError):
    """A forward pass failed; no token of its plan was produced."""


class RanksLost(OctavoError, RuntimeError):
    """A process of a tensor-parallel engine died or hangs, or the processes disagree; the engine cannot go on."""


class WorkerLost(OctavoError, RuntimeError):
    """The worker of backend grpc ended or did not answer in time, and with it the KV cache; the engine cannot go on."""


class RequestError(OctavoError, ValueError):
    """A request that was refused or ended with an error, as the OpenAI API reports it.

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
    """The prompt and its ``max_tokens`` exceed the model's context length.

    ``num_tokens`` are those of a prompt that alone exceeds it, if they were counted; ``limit`` is the context length.
    """

    code = "context_length_exceeded"

    num_tokens: int | None = None
    limit: int = 0


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
    """Too many requests are waiting; retry after ``retry_after`` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(RequestError):
    """The server is starting or draining, or its engine is not running."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"


class Withdrawn(Unavailable):
    """Whoever operates the server ended this request before it was finished."""

    code = "request_withdrawn"


class DeadlineExceeded(RequestError):
    """The request did not finish within the client's timeout, or the server's."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request was not finished within the timeout of {seconds:g} s.", param="timeout")


class RequestFailed(RequestError):
    """The engine could not finish this request; other requests are not affected."""

    status = 500
    type = "server_error"
    code = "request_failed"
