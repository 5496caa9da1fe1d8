"""The smallest ``priority`` first; among equals, first come, first served."""

from __future__ import annotations

from octavo.types import Request

name = "priority"


def order(request: Request, arrival_number: int) -> tuple[int, ...]:
    return (request.priority, arrival_number)
