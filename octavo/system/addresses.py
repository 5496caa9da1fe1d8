"""Addresses of other processes."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether ``address``, with or without a port, can be of this machine only. Names are not looked up."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0] if address.count(":") == 1 or "]" in address else address
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ``ValueError``."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
