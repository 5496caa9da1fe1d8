"""Pooled connections."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from octavo_fleet.proxy import connections as module
from octavo_fleet.proxy.connections import Connections, InvalidResponse


def test_a_body_that_was_left_unread_is_not_read_by_the_next_request() -> None:
    """Otherwise a client would get what belongs to another one, who went away."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = b"for " + head.split()[1]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        async with connections.request("GET", "first") as connection:
            while not connection.is_reusable:
                await asyncio.sleep(0.001)
        async with connections.request("GET", "second") as again:
            assert again is connection
            assert await again.read() == b"for /second"
        connections.close()
        server.close()

    asyncio.run(main())


def test_a_body_is_divided_whatever_pieces_it_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the body does not end is dropped, and what has no end is refused."""
    monkeypatch.setattr(module, "MAX_PART", 8)
    bodies = {"/short": [b"one", b"\n", b"\ntwo\nmore\n\nthr", b"ee"], "/long": [b"one\n\n", b"12345", b"6789"]}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for piece in bodies[head.split()[1].decode()]:
            writer.write(piece)
            await asyncio.sleep(0.01)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        connections, events = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"), list[bytes]()

        async def read(target: str) -> None:
            async with connections.request("GET", target) as connection:
                async for event in connection.divided(b"\n\n"):
                    events.append(event)

        await read("short")
        with pytest.raises(InvalidResponse):
            await read("long")
        assert events == [b"one", b"two\nmore", b"one"]
        server.close()

    asyncio.run(main())
