"""How the two ends of a connection know each other: TLS, and a key that both were given.

Between processes of one machine neither is needed. A worker at another address has a certificate, and is asked with a
key; it computes for whom it is asked, and what it answers becomes text of the server's clients.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

HEADER = "authorization"
SCHEME = "Bearer "


def metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    """What is sent with every call."""
    return () if key is None else ((HEADER, SCHEME + key),)


def open_channel(address: str, ca_certs: str | None, options: list[tuple[str, int]]) -> Any:
    """A channel to a worker: encrypted if there is a file of CAs. Raises ``ConfigError``."""
    import grpc

    if ca_certs is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(read_file(ca_certs, "grpc_ssl_ca_certs")), options)


def listen(server: Any, address: str, certificate: bytes | None, private_key: bytes | None) -> int:
    """Let ``server`` serve at ``address``, with TLS if there is a certificate; returns the port."""
    import grpc

    if certificate is None:
        return int(server.add_insecure_port(address))
    return int(
        server.add_secure_port(address, grpc.ssl_server_credentials([(private_key or certificate, certificate)]))
    )


def key_check(key: str) -> Any:
    """An interceptor of a server that ends calls without ``key`` with UNAUTHENTICATED."""
    import grpc

    def refuse(requests: Iterator[Any], context: Any) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the key is missing or wrong")

    class KeyCheck(grpc.ServerInterceptor):  # type: ignore[misc]
        """Compares digests, whose comparison takes the same time for every key."""

        _digest = _digest_of(SCHEME + key)
        _refusal = grpc.stream_stream_rpc_method_handler(refuse)

        def intercept_service(self, continuation: Any, details: Any) -> Any:
            given = [value for name, value in details.invocation_metadata if name == HEADER]
            if len(given) == 1 and hmac.compare_digest(_digest_of(given[0]), self._digest):
                return continuation(details)
            return self._refusal

    return KeyCheck()


def check_key(key: str, name: str) -> None:
    """Raise ``ConfigError`` for a key that cannot be sent."""
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"{name}: must be printable ASCII characters")


def read_file(path: str, name: str) -> bytes:
    """A file of certificates or a private key. Raises ``ConfigError``, with the ``name`` of the setting."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from None


def _digest_of(text: str | bytes) -> bytes:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()
