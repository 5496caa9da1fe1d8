"""Requests of the server itself, of background responses and batches: durable ones, if there is a journal."""

from __future__ import annotations

from octavo_server.admission import ClientRequest
from octavo_server.durable import journal
from octavo_server.generation import IDEMPOTENCY_KEY, Generation
from octavo_server.services import ModelServices, ServerServices
from octavo_server.tenants.api_keys import Caller


async def admit_inner(services: ModelServices, key: str, submitted: ClientRequest) -> Generation:
    """Admit a request of the server itself, which is durable if there is a journal. Raises ``RequestError``.

    ``key`` is one that no client's request has. The caller must begin the result's ``reader``, if it has one.
    """
    if services.journal is None:
        return await services.admission.admit(submitted)
    return await services.journal.admit_once(submitted.caller, f"/{key}", "", submitted, services.admission)


def can_continue(services: ModelServices, caller: Caller, key: str) -> bool:
    """Whether the server's own request of this key continues where it was, and does not begin again."""
    return services.journal is not None and services.journal.can_continue(caller, f"/{key}")


def end_inner(server: ServerServices, caller: Caller, key: str) -> None:
    """Drop a request of the server itself, whose result is stored or not wanted."""
    for log in server.journals:
        log.cancel(caller, f"/{key}")


def key_headers(server: ServerServices, caller: Caller, key: str) -> list[tuple[bytes, bytes]]:
    """Headers with which a client's endpoint continues a request of the server itself, if there is a journal."""
    if not server.journals:
        return []
    for log in server.journals:
        log.can_continue(caller, journal.of_client(key))  # drops what was begun by a server that has changed
    return [(IDEMPOTENCY_KEY.encode(), key.encode())]


def end_with_key(server: ServerServices, caller: Caller, key: str) -> None:
    """Drop a request with ``key_headers``, whose result is stored."""
    for log in server.journals:
        log.cancel(caller, journal.of_client(key))


def end_all(server: ServerServices, caller: Caller, prefix: str) -> None:
    """Drop all requests with ``key_headers`` whose keys begin with ``prefix``."""
    for log in server.journals:
        log.cancel_all(caller, journal.of_client(prefix))
