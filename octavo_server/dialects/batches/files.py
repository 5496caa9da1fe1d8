"""/v1/files: input and output files of batches.

https://platform.openai.com/docs/api-reference/files
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.errors import InvalidParameter
from octavo_server.durable.store import Store, StoredItem, decode, decoded
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter, NotFound, printable
from octavo_server.http.multipart_form import MultipartForm
from octavo_server.http.paging import page
from octavo_server.http.response import json_response
from octavo_server.services import server_of
from octavo_server.tenants.api_keys import caller_of

KIND = "file"
CONTENT = "file_content"
"""Store kind of whole contents, which earlier versions stored."""
PURPOSES = ("batch", "vision", "user_data")
"""Of uploaded files: requests of a batch, or images of requests."""
MAX_NAME = 255
PIECE_BYTES = 256 << 10
"""Of a content that are stored, and sent, at a time: memory does not grow with the size of files."""

Get = Callable[[str, str, str], Awaitable[bytes | None]]
"""Kind, id and owner to a stored value."""


class FileObject(msgspec.Struct, kw_only=True):
    """The API's file object. ``bytes`` is its size, ``created_at`` seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None


async def create_file(request: Request) -> Response:
    server = server_of(request)
    with tempfile.TemporaryFile() as content:  # without a name, readable by this process only
        form = MultipartForm(request, content)
        await server.body_receiver.spool(request, form.take)
        form.finish()
        if form.file_name is None:
            raise MissingParameter("file")
        purpose = form.fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose not in PURPOSES:
            raise InvalidParameter("purpose", f"'purpose' must be one of {', '.join(PURPOSES)}.")
        file = new_file(form.file_name, content, purpose)
        await server.store.put_all(caller_of(request).name, StoredFile(file, content), is_large=True)
    return json_response(msgspec.to_builtins(file), {})


def new_file(name: str, content: BinaryIO, purpose: str) -> FileObject:
    """A new file object with a fresh id, for all of ``content``."""
    return FileObject(
        id=f"file-{uuid.uuid4().hex}",
        bytes=content.seek(0, os.SEEK_END),
        created_at=int(time.time()),
        filename=name[:MAX_NAME],
        purpose=purpose,
    )


class StoredFile:
    """The store items of a file, read from ``content`` as they are stored."""

    def __init__(self, file: FileObject, content: BinaryIO) -> None:
        self._file = file
        self._content = content

    def __iter__(self) -> Iterator[StoredItem]:
        yield StoredItem(KIND, self._file.id, msgspec.json.encode(self._file))
        self._content.seek(0)
        kind = _pieces_kind(self._file.id)
        for number in itertools.count():
            if not (piece := self._content.read(PIECE_BYTES)):
                return
            yield StoredItem(kind, _piece_id(number), piece)


def file_reader(store: Store, owner: str) -> Callable[[str], Awaitable[bytes | None]]:
    """Reads an owner's files by id; ``None`` if there is none of an id."""

    async def read(id: str) -> bytes | None:
        if await find(store, id, owner) is None:
            return None
        return b"".join([piece async for piece in content_of(store.get, id, owner)])

    return read


async def content_of(get: Get, id: str, owner: str) -> AsyncIterator[bytes]:
    """The content of an owner's file in pieces; none if there is no such file. ``get`` is that of the store."""
    if (whole := await get(CONTENT, id, owner)) is not None:
        yield whole
        return
    for number in itertools.count():
        piece = await get(_pieces_kind(id), _piece_id(number), owner)
        if piece is None:
            return
        yield piece


def _pieces_kind(id: str) -> str:
    return f"pieces of {id}"


def _piece_id(number: int) -> str:
    return f"{number:06}"


async def list_files(request: Request) -> Response:
    kept = await server_of(request).store.list(KIND, caller_of(request).name)
    purpose = request.query_params.get("purpose")
    files: list[dict[str, Any]] = [msgspec.to_builtins(file) for _, file in decoded(KIND, kept, FileObject)]
    return json_response(page(request, [file for file in files if purpose in (None, file["purpose"])]), {})


async def retrieve_file(request: Request) -> Response:
    return json_response(msgspec.to_builtins(await _file(request)), {})


async def file_content(request: Request) -> Response:
    file = await _file(request)
    content = content_of(server_of(request).store.get, file.id, caller_of(request).name)
    headers = {"content-length": str(file.bytes)}
    return StreamingResponse(content, headers=headers, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    store, owner, name = server_of(request).store, caller_of(request).name, request.path_params["file_id"]
    if not await forget(store, name, owner):
        raise _not_found(name)
    return json_response({"id": name, "object": "file", "deleted": True}, {})


ENDPOINTS = [
    Endpoint("POST", "/v1/files", create_file, "Keep a file for a batch"),
    Endpoint("GET", "/v1/files", list_files, "List the files"),
    Endpoint("GET", "/v1/files/{file_id}", retrieve_file, "Describe a file"),
    Endpoint("GET", "/v1/files/{file_id}/content", file_content, "The bytes of a file"),
    Endpoint("DELETE", "/v1/files/{file_id}", delete_file, "Forget a file"),
]


async def find(store: Store, id: str, owner: str) -> FileObject | None:
    """The file of this id, if it is the owner's. Raises ``Unreadable``."""
    value = await store.get(KIND, id, owner)
    return None if value is None else decode(KIND, id, value, FileObject)


async def forget(store: Store, id: str, owner: str) -> bool:
    """Delete an owner's file; return whether it existed."""
    if not await store.delete(KIND, id, owner):
        return False
    await store.delete(CONTENT, id, owner)
    await store.put_all(owner, [], instead_of=_pieces_kind(id))
    return True


async def _file(request: Request) -> FileObject:
    """The file that the path names. Raises ``RequestError``."""
    name = request.path_params["file_id"]
    file = await find(server_of(request).store, name, caller_of(request).name)
    if file is None:
        raise _not_found(name)
    return file


def _not_found(name: str) -> NotFound:
    return NotFound(f"There is no file '{printable(name)}'.", param="file_id")
