"""Pooled connections."""

from __future__ import annotations

import asyncio
import contextlib

from octavo_fleet.proxy.connections import Connections


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
