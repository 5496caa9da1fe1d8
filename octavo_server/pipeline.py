"""The way of a request for text, one for all dialects.

A dialect is a pair of translators: of a body into a ``Submission``, and of the outputs into an ``Answer``. All that is
between them is here: room, decoding, admission, durable requests, timelines, streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo_server.admission import ClientRequest
from octavo_server.generation import IDEMPOTENCY_KEY, EventWriter, GeneratedChoice, Generation
from octavo_server.http.endpoint import JSON, Endpoint
from octavo_server.http.error_responses import ERROR, ErrorForm
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import EventStream, encode, finished_choices, json_response
from octavo_server.services import Body, ModelServices, server_of

WEIGHT_VERSION = "x-octavo-weight-version"
"""Header of answers of a server whose weights may change: their version, of a stream when it begins."""


class Answer(EventWriter, Protocol):
    """Renders the outputs of a generation. Those of an API that always streams, or never, lack the other."""

    id: str = ""
    """The name of the request's timeline; "": it has none."""

    def unstreamed(self, choices: list[GeneratedChoice]) -> object:
        """The answer as a JSON value, once all choices are finished."""
        return None

    def frames(self, choice: GeneratedChoice) -> bytes:
        return b""

    def last_frames(self) -> bytes:
        return b""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a body asks for."""

    request: ClientRequest
    answer: Callable[[Generation], Answer]
    is_streamed: bool
    stream: Callable[[Generation, EventWriter, Mapping[str, str]], EventStream] = EventStream
    """The form of a stream: its headers, its end, its errors."""
    respond: Callable[[object, Mapping[str, str]], Response] = json_response
    """Sends an answer that is not streamed, with its headers."""
    is_large: bool = False
    """Whether the answer that is not streamed may be megabytes of JSON, which is rendered in a thread."""
    is_resumable: bool = False
    """Whether it may be durable: a client may then read its events again, from any of them on."""
    in_words: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Lets the errors of admission read as the dialect's."""
    keep: Callable[[], Awaitable[None]] | None = None
    """Stores an answer that is not streamed before it is sent."""


class Dialect(Generic[Body]):
    """One kind of body, and how it is answered."""

    MEDIA_TYPE = JSON
    """Of the body."""

    def __init__(
        self,
        decoder: BodyDecoder[Body],
        translate: Callable[[Body, ModelServices, Request], Awaitable[Submission | Response]],
        without_effect: Callable[[Body, ModelServices], list[str]] = lambda body, services: [],
        statuses: Mapping[type[RequestError], int] = MappingProxyType({}),
    ) -> None:
        """``translate`` may answer itself what asks for no text; then with the headers ``request.state.headers``.

        ``without_effect`` returns the fields of a body that have no effect for this model or request. Errors get the
        status of the first class in ``statuses`` that they are an instance of.
        """
        self._decoder = decoder
        self._translate = translate
        self._without_effect = without_effect
        self._statuses = statuses

    def endpoint(self, path: str, summary: str, name: str, errors: ErrorForm = ERROR) -> Endpoint:
        """The endpoint to which such bodies are posted; ``name`` is the id of the operation."""
        return Endpoint("POST", path, self.serve, summary, self._decoder.documented, name, errors, self.MEDIA_TYPE)

    async def serve(self, request: Request) -> Response:
        """The response to a request. Raises ``RequestError``."""
        try:
            return await self._serve(request)
        except RequestError as error:
            for kind, status in self._statuses.items():
                if isinstance(error, kind):
                    error.status = status
                    break
            raise

    async def _serve(self, request: Request) -> Response:
        server = server_of(request)
        request.state.started = time.monotonic()
        server.check_room(request)
        services, body, headers = await server.read(request, self._decoder, self._without_effect)
        asked = await self._translate(body, services, request)
        if isinstance(asked, Response):
            return asked
        journal = services.journal if asked.is_resumable and IDEMPOTENCY_KEY in request.headers else None
        with asked.in_words():
            if journal is None:
                generation = await services.admission.admit(asked.request)
            else:
                generation = await journal.admit(request, body, asked.request, services.admission)
        answer = asked.answer(generation)
        if answer.id:
            services.engine.timelines.name(answer.id, [choice.request.id for choice in generation.choices])
        reader = generation.reader
        if asked.is_streamed:
            writer = answer if reader is None else reader.begin_stream(answer, request)
            headers |= _version_of(generation.choices, services)
            return asked.stream(generation, writer, headers)
        if reader is not None:
            reader.begin(None)
        choices = await finished_choices(generation, request)
        headers |= _version_of(choices, services)
        if asked.is_large:
            shown: object = await asyncio.to_thread(lambda: msgspec.Raw(encode(answer.unstreamed(choices))))
        else:
            shown = answer.unstreamed(choices)
        if asked.keep is not None:
            await asked.keep()
        return asked.respond(shown, headers)


def _version_of(choices: Sequence[GeneratedChoice], services: ModelServices) -> dict[str, str]:
    """The header that names the weights of the last tokens, or of those that come, if it is known and can change.

    A generation that has failed has no choices any more.
    """
    version = choices[-1].weight_versions[-1][0] if choices else ""
    return {WEIGHT_VERSION: version} if services.takes_weights and version else {}
