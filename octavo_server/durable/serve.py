"""Durable requests as endpoints use them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from octavo_server.admission import ClientRequest
from octavo_server.durable import journal, reader
from octavo_server.generation import Generation
from octavo_server.http.sse import EventWriter
from octavo_server.services import Services
from octavo_server.tenants.api_keys import Caller, caller_of


async def admit(services: Services, request: Request, body: msgspec.Struct, submitted: ClientRequest) -> Generation:
    """Admit a request; one with an idempotency key is durable if there is a journal. Raises ``RequestError``."""
    if services.journal is None or journal.HEADER not in request.headers:
        return await services.admission.admit(submitted)
    return await services.journal.admit(request, body, submitted, services.admission)


async def admit_inner(services: Services, request: Request, key: str, submitted: ClientRequest) -> Generation:
    """Admit a request of the server itself, which is durable if there is a journal. Raises ``RequestError``.

    ``key`` is one that no client's request has. The caller must call ``begin_by_token``.
    """
    if services.journal is None:
        return await services.admission.admit(submitted)
    return await services.journal.admit_once(caller_of(request), f"/{key}", "", submitted, services.admission)


def can_continue(services: Services, caller: Caller, key: str) -> bool:
    """Whether the server's own request of this key continues where it was, and does not begin again."""
    return services.journal is not None and services.journal.can_continue(caller, f"/{key}")


def end_inner(services: Services, caller: Caller, key: str) -> None:
    """Drop a request of the server itself, whose result is stored or not wanted."""
    for log in services.journals:
        log.cancel(caller, f"/{key}")


def key_headers(services: Services, caller: Caller, key: str) -> list[tuple[bytes, bytes]]:
    """Headers with which a client's endpoint continues a request of the server itself, if there is a journal."""
    if services.journal is None:
        return []
    for log in services.journals:
        log.can_continue(caller, journal.of_client(key))  # drops what was begun by a server that has changed
    return [(journal.HEADER.encode(), key.encode())]


def end_with_key(services: Services, caller: Caller, key: str) -> None:
    """Drop a request with ``key_headers``, whose result is stored."""
    for log in services.journals:
        log.cancel(caller, journal.of_client(key))


def end_all(services: Services, caller: Caller, prefix: str) -> None:
    """Drop all requests with ``key_headers`` whose keys begin with ``prefix``."""
    for log in services.journals:
        log.cancel_all(caller, journal.of_client(prefix))


def numbered(generation: Generation, writer: EventWriter, request: Request) -> EventWriter:
    """``writer``, with ids for the events of a durable request, from the position of the client on.

    Raises ``InvalidParameter`` for an invalid position.
    """
    if not isinstance(generation.reader, reader.Reader):
        return writer
    last = request.headers.get(reader.HEADER)
    position = None if last is None else reader.parse_position(last, len(generation.choices))
    generation.reader.begin(writer, position)
    return generation.reader


def begin_unstreamed(generation: Generation) -> None:
    """Let a durable request's output arrive, for a response that is not streamed."""
    if isinstance(generation.reader, reader.Reader):
        generation.reader.begin(None)


def begin_by_token(generation: Generation) -> None:
    """Let a durable request's output arrive token by token, so that it comes in the same parts each time."""
    if isinstance(generation.reader, reader.Reader):
        generation.reader.begin(None, is_by_token=True)
