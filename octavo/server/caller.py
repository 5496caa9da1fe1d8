"""Who sends a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from octavo.server.quotas import Account

CALLER = "octavo.caller"
"""Key of the ASGI scope; the gate sets it."""


@dataclass(frozen=True)
class Caller:
    """An API key's owner; without keys there is one, whose name is empty."""

    name: str = ""
    sees_all: bool = False
    """Also what others have asked for."""
    account: Account = field(default_factory=Account)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope.get(CALLER) or Caller()
    return caller
