"""The access log: one line for each answered request, when its response is complete.

It has no bodies, query strings or headers, so neither prompts nor keys.
"""

from __future__ import annotations

import logging

from starlette.types import Scope

from octavo_server.http.errors import printable
from octavo_server.tenants.api_keys import CALLER

PROBES = frozenset({"/health", "/ready", "/metrics", "/load", "/ping", "/is_sleeping"})
"""Paths that monitoring requests every few seconds; they are logged at level debug."""

logger = logging.getLogger("octavo.access")


def log_access(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    """Log a request. ``status`` is 499 for a client that left before the response began."""
    level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
    if not logger.isEnabledFor(level):
        return
    client, path = (scope.get("client") or ("-",))[0], printable(scope["path"])
    fields = {
        "client": client,
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "request_id": request_id,
    }
    if caller := getattr(scope.get(CALLER), "name", ""):
        fields["key"] = caller
    logger.log(
        level,
        "%s %s %s %d %.3f s %s",
        *(client, scope["method"], path, status, seconds, request_id),
        extra={"fields": fields},
    )
