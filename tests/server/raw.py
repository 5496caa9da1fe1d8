"""HTTP by hand, for what clients hide: bytes as they come, and connections that are cut."""

from __future__ import annotations

import asyncio
import json
from typing import Any


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(port: int, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request; the answer is still to be read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(path, body))
    await writer.drain()
    return reader, writer


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One piece of a chunked answer: what the server sent at once. Empty at the end."""
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]


async def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    reader, writer = await connect(port, path, body)
    status, headers = await read_head(reader)
    if "content-length" in headers:
        data = await reader.readexactly(int(headers["content-length"]))
    else:
        data = b""
        while piece := await read_chunk(reader):
            data += piece
    writer.close()
    return status, headers, data
