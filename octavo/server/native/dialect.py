"""Errors with the statuses that a dialect of its own gives them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError

Answer = Callable[[Request], Awaitable[Response]]


def with_statuses(answer: Answer, statuses: Mapping[type[RequestError], int]) -> Answer:
    """``answer``, whose refusals have the status of the first class in ``statuses`` that they belong to."""

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
