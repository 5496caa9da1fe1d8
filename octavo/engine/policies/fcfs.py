"""First come, first served."""

from __future__ import annotations

from octavo.types import Request

name = "fcfs"


def order(request: Request, arrival_number: int) -> tuple[int, ...]:
    return (arrival_number,)
