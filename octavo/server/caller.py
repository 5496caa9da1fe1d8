"""Who sends a request."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

CALLER = "octavo.caller"
"""Key of the ASGI scope; the gate sets it."""


@dataclass(frozen=True)
class Caller:
    """An API key's owner; without keys there is one, whose name is empty."""

    name: str = ""
    is_batch: bool = False
    """Whether it is the server itself, at work on a batch."""


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope.get(CALLER, Caller())
    return caller
