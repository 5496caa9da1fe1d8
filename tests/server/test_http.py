"""The bytes of an answer on its connection: the head leaves with the first piece, and nothing waits that must not."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from octavo.server_settings import ServerSettings
from octavo_server.http.server import WRITE_PIECE, HTTPServer

POST = b"POST /%b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nok"


class Connection(asyncio.Transport):
    """A connection whose writes are kept, one entry for each."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def write(self, data: Any) -> None:
        if data:
            self.writes.append(bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Pieces(Response):
    """Three pieces: by ``send``, by what the scope has for it, and by ``send`` again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        assert scope[WRITE_PIECE](b"two")
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"three", "more_body": False})


async def pieces(request: Request) -> Response:
    await request.body()
    return Pieces()


async def plain(request: Request) -> Response:
    return PlainTextResponse(await request.body() or b"got")


def writes(*received: bytes) -> list[bytes]:
    """What is written after each of these has arrived, one after the other."""

    async def converse() -> list[bytes]:
        app = Starlette(
            routes=[Route("/pieces", pieces, methods=["POST"]), Route("/plain", plain, methods=["GET", "POST"])]
        )
        config = HTTPServer(app, ServerSettings()).config
        protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        connection = Connection()
        protocol.connection_made(connection)
        for data in received:
            protocol.data_received(data)
            for _ in range(50):
                await asyncio.sleep(0)
        return connection.writes

    return asyncio.run(converse())


def test_the_head_is_written_with_the_first_piece() -> None:
    first, *others = writes(POST % b"pieces")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert others == [b"3\r\ntwo\r\n", b"5\r\nthree\r\n0\r\n\r\n"]


def test_a_whole_answer_is_one_write() -> None:
    (answer,) = writes(POST % b"plain")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok")


def test_each_answer_on_a_connection_has_its_own_head() -> None:
    found = writes(POST % b"pieces" + POST % b"plain" + POST % b"pieces")
    pieces = [b"HTTP/1.1", b"3\r\ntwo\r\n", b"5\r\nthree"]
    assert [data[:8] for data in found] == [*pieces, b"HTTP/1.1", *pieces]


def test_a_head_without_a_body_is_written() -> None:
    (head,) = writes(b"HEAD /plain HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n")


def test_a_client_that_expects_100_continue_gets_it() -> None:
    head = b"POST /plain HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    proceed, *answer = writes(head, b"ok")
    assert proceed == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert b"".join(answer).startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"".join(answer).endswith(b"\r\n\r\nok")
