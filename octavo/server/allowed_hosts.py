"""Validation of the ``Host`` header, as a defence against DNS rebinding.

A web page can point its own host name at this server's address, so that a browser on the local network sends requests
and lets the page read the responses. Such requests carry the page's name in ``Host``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from octavo.server.errors import HTTPRefusal
from octavo.server_settings import ServerSettings

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
"""Names of the host inside its containers. They resolve only there, so no web page can own them."""
LOCAL = LOOPBACK | CONTAINER_NAMES
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s/@:\[\]]+))(?::\d{1,5})?")


class AllowedHosts:
    """Checks ``Host`` against ``allowed``, a set of lower-case names; ``None`` allows any name."""

    def __init__(self, settings: ServerSettings) -> None:
        self.allowed: frozenset[str] | None = LOCAL if settings.host in LOOPBACK else None
        if settings.allowed_hosts is not None:
            names = frozenset(name.strip().lower() for name in settings.allowed_hosts.split(","))
            self.allowed = None if "*" in names else names | LOCAL

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ``HTTPRefusal`` for a name that is not allowed."""
        if self.allowed is None:
            return
        found = _HOST.fullmatch(headers.get("host", "").lower())
        name = (found.group(1) or found.group(2)) if found else ""
        if name.rstrip(".") not in self.allowed:
            raise HTTPRefusal(421, "This server has no such name: see --allowed-hosts.", "host_not_allowed")
