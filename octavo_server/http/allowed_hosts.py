"""Validation of ``Host`` and ``Origin``, as defences against web pages of others.

A web page can point its own host name at this server's address, so that a browser on the local network sends requests
and lets the page read the responses (DNS rebinding). Such requests carry the page's name in ``Host``.

A page can also make a browser send some requests to any server without asking it first: forms, plain text, bodies of
no type. The page cannot read the responses, but the requests have an effect (cross-site request forgery). A browser
names the page's origin in ``Origin``, and its relation to the server in ``Sec-Fetch-Site``:
https://www.w3.org/TR/fetch-metadata/
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from octavo.server_settings import ServerSettings
from octavo_server.http.errors import HTTPRefusal, printable

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
"""Names of the host inside its containers. They resolve only there, so no web page can own them."""
LOCAL = LOOPBACK | CONTAINER_NAMES
WITHOUT_EFFECT = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing, whatever the path: any page may send them, and read no response."""
OTHER_SITES = frozenset({"cross-site", "same-site"})
"""Values of ``Sec-Fetch-Site`` that a browser sends for a page of another origin."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
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


class AllowedOrigins:
    """Refuses what a page of another origin makes a browser send, unless ``names`` has its origin or ``*``.

    Other clients send neither ``Origin`` nor ``Sec-Fetch-Site``.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.names = [origin.strip() for origin in (settings.allowed_origins or "").split(",") if origin.strip()]

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Raises ``HTTPRefusal`` for a request that may have an effect."""
        if method in WITHOUT_EFFECT or "*" in self.names:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "")
        if origin in self.names:
            return
        is_own = origin is None or _is_of(origin.lower(), headers.get("host", "").lower())
        if not is_own or site.lower() in OTHER_SITES:
            what = f"The web page's origin {printable(origin)}" if origin else "The web page's origin"
            message = f"{what} may not use this server: see --allowed-origins."
            raise HTTPRefusal(403, message, "origin_not_allowed")


def _is_of(origin: str, host: str) -> bool:
    """Whether an origin has the host and port of ``Host``. The scheme does not count, as a proxy may terminate TLS."""
    scheme, separator, own = origin.partition("://")
    for port in DEFAULT_PORTS.values():
        host = host.removesuffix(port)
    return bool(separator and host) and own.removesuffix(DEFAULT_PORTS.get(scheme, "/")) == host
