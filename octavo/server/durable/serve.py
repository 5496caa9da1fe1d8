"""Durable requests as endpoints use them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from octavo.server.admission import ClientRequest
from octavo.server.durable import journal, reader
from octavo.server.generation import Generation
from octavo.server.keys import Caller, caller_of
from octavo.server.services import Services
from octavo.server.sse import EventWriter


async def admit(services: Services, request: Request, body: msgspec.Struct, submitted: ClientRequest) -> Generation:
    """Admit a request; one with an idempotency key is durable if there is a journal. Raises ``RequestError``."""
    if services.journal is None or journal.HEADER not in request.headers:
        return await services.admission.admit(submitted)
    return await services.journal.admit(request, body, submitted, services.admission)


async def admit_inner(services: Services, request: Request, key: str, submitted: ClientRequest) -> Generation:
    """Admit a request of the server itself, which is durable if there is a journal. Raises ``RequestError``.

    ``key`` is one that no client's request has.
    """
    if services.journal is None:
        return await services.admission.admit(submitted)
    generation = await services.journal.admit_once(caller_of(request), f"/{key}", "", submitted, services.admission)
    begin_unstreamed(generation)
    return generation


def end_inner(services: Services, caller: Caller, key: str) -> None:
    """Drop a request of the server itself, whose result is stored or not wanted."""
    if services.journal is not None:
        services.journal.cancel(caller, f"/{key}")


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
