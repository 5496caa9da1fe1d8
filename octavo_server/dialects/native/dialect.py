"""Endpoint-specific HTTP statuses of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError

Answer = Callable[[Request], Awaitable[Response]]


def with_statuses(answer: Answer, statuses: Mapping[type[RequestError], int]) -> Answer:
    """Wrap ``answer``: errors get the status of the first class in ``statuses`` that they are an instance of."""

    async def worded(request: Request) -> Response:
        try:
            return await answer(request)
        except RequestError as error:
            for kind, status in statuses.items():
                if isinstance(error, kind):
                    error.status = status
                    break
            raise

    worded.__name__ = answer.__name__
    return worded
