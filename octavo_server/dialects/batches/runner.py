"""Runs the lines of a batch through the endpoint handlers that serve clients."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response

from octavo.errors import CANCELLATIONS, QueueFull, RequestError, Unavailable
from octavo_server.durable.background_jobs import inner_request, retry_while_unavailable
from octavo_server.durable.own_requests import key_headers
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnexpectedError
from octavo_server.http.request_body import BYTE_ORDER_MARK, num_members
from octavo_server.services import ServerServices
from octavo_server.tenants.api_keys import Caller
from octavo_server.tenants.turn_queue import Places

MAX_LINES = 50_000

logger = logging.getLogger(__name__)


class BatchLine(msgspec.Struct, kw_only=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Outcome(msgspec.Struct, kw_only=True):
    """The result of a line, in the format of the result file."""

    id: str
    custom_id: str
    response: dict[str, Any]
    """``status_code``, ``request_id`` and ``body``, which is an error object unless the status is 200."""
    error: None = None


class BadLine(ValueError):
    """An invalid line; the message says why. ``number`` is ``None`` when it concerns the file."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


class _Streamed(msgspec.Struct):
    """The only field of a body that is read before the body is handled."""

    stream: Any = None


async def lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The lines of a file with their ends, some at a time, so that memory does not grow with the file."""
    rest: list[bytes] = []  # the beginning of a line whose end is missing
    async for piece in pieces:
        if b"\n" not in piece and b"\r" not in piece:
            rest.append(piece)
            continue
        *lines, last = await asyncio.to_thread(b"".join([*rest, piece]).splitlines, keepends=True)
        # What ends with a carriage return may go on with a line feed.
        rest = [] if last.endswith(b"\n") else [last]
        yield lines if rest else [*lines, last]
    yield [b"".join(rest)]


class LineReader:
    """Reads and checks the requests in a file."""

    def __init__(self, urls: Collection[str]) -> None:
        self.num_lines = 0
        """Requests so far."""
        self._urls = urls
        self._number = 0
        """Of the last line."""
        self._seen: set[bytes] = set()

    async def read(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[BatchLine]:
        """All requests in ``pieces``. Raises ``BadLine`` with the line number."""
        async for texts in lines_of(pieces):
            for line in await asyncio.to_thread(self.parsed, texts):
                yield line

    def check_number(self) -> None:
        """Raise ``BadLine`` for too few or too many requests."""
        if not 1 <= self.num_lines <= MAX_LINES:
            raise BadLine(f"A batch must have 1 to {MAX_LINES} lines; this one has {self.num_lines}.")

    def parsed(self, texts: Iterable[bytes]) -> list[BatchLine]:
        """The requests in the next lines. Raises ``BadLine``."""
        lines = []
        for text in texts:
            self._number += 1
            text = text.removeprefix(BYTE_ORDER_MARK)  # also within a file that was joined from several
            if not text.isspace() and text:
                lines.append(self._line(text, self._number))
                self.num_lines += 1
        return lines

    def _line(self, text: bytes, number: int) -> BatchLine:
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = f"Line {number} must be an object with 'custom_id', 'method', 'url' and 'body'."
            raise BadLine(message, number) from None
        members: dict[str, msgspec.Raw] = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        if num_members(text) != len(members) + sum(num_members(bytes(member)) for member in members.values()):
            raise BadLine(f"Line {number} has the same name twice.", number)
        if line.method != "POST" or line.url not in self._urls:
            message = f"Line {number} must have the method POST and the url {' or '.join(self._urls)}."
            raise BadLine(message, number)
        digest = digest_of(line.custom_id)
        if digest in self._seen:
            raise BadLine(f"Line {number} has a 'custom_id' that an earlier line has.", number)
        if asks_for_stream(line.body):
            raise BadLine(f"Line {number} asks for a stream, which a batch cannot have.", number)
        self._seen.add(digest)
        return line


def digest_of(custom_id: str) -> bytes:
    """Stands for a ``custom_id``, which may be long."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def asks_for_stream(body: msgspec.Raw) -> bool:
    """Whether the body has ``stream`` set. False for an invalid body, which the endpoint rejects later."""
    try:
        return bool(msgspec.json.decode(body, type=_Streamed).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class LineRunner:
    """Runs lines, at most ``num_places`` at a time. API keys have turns, however many batches one has."""

    def __init__(self, app: Starlette, endpoints: Mapping[str, Endpoint], num_places: int) -> None:
        self._server: ServerServices = app.state.services
        self._app = app
        self._endpoints = endpoints
        self.num_places = num_places
        self._places = Places(num_places)

    async def run(self, line: BatchLine, caller: Caller, key: str) -> Outcome:
        """Run ``line`` and return its outcome; waits while the server is full or shutting down.

        ``key`` is that of its request in the journal, if there is one.
        """
        async with self._places.place(caller.name):
            response = await retry_while_unavailable(lambda: self._answer(line, caller, key))
        return Outcome(id=f"batch_req_{uuid.uuid4().hex}", custom_id=line.custom_id, response=response)

    async def _answer(self, line: BatchLine, caller: Caller, key: str) -> dict[str, Any]:
        status, body = 200, b""
        write = self._endpoints[line.url].errors.body
        request_id = uuid.uuid4().hex
        try:
            headers = key_headers(self._server, caller, key)
            request = inner_request(self._app, line.url, bytes(line.body), caller, headers)
            response: Response = await self._endpoints[line.url].endpoint(request)
            body = bytes(response.body)
        except (QueueFull, Unavailable):
            raise
        except RequestError as error:
            status, body = error.status, msgspec.json.encode(write(error))
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("%s: a line of a batch failed", request_id)
            status, body = 500, msgspec.json.encode(write(UnexpectedError()))
        return {"status_code": status, "request_id": request_id, "body": msgspec.json.decode(body)}
