"""The identity behind a request: the owner of its API key."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from octavo.server.quotas import Account

CALLER = "octavo.caller"
"""Key of the ASGI scope; the middleware sets it."""


@dataclass(frozen=True)
class Caller:
    """An API key's owner. A server without keys has one caller, with an empty name."""

    name: str = ""
    sees_all: bool = False
    """Whether it may read reports on other callers' requests."""
    account: Account = field(default_factory=Account)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope.get(CALLER) or Caller()
    return caller
