"""Which names of this server clients may use.

A web page can make the browser of somebody beside this server connect to it under a name of the page's own (DNS
rebinding), and would then be told everything; the header ``Host`` gives such a page away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from octavo.config import ServerSettings
from octavo.server.errors import HTTPRefusal

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
"""The machine's names in its own containers; only their resolvers know them, so no page can have them."""
LOCAL = LOOPBACK | CONTAINER_NAMES
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s/@:\[\]]+))(?::\d{1,5})?")


class AllowedHosts:
    """The names that are allowed; ``None`` is any."""

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
