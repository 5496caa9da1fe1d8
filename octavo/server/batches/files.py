"""/v1/files: input and output files of batches.

https://platform.openai.com/docs/api-reference/files
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, create_form_parser
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.server.errors import HTTPRefusal, MissingParameter, NotFound, printable
from octavo.server.keys import caller_of
from octavo.server.openai.pages import page
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint
from octavo.server.services import services_of
from octavo.server.store import StoredItem, decoded

KIND = "file"
CONTENT = "file_content"
MAX_NAME = 255
MAX_PARTS = 32
"""Most parts of a multipart form. Two are used; parsing a part costs far more than its bytes suggest."""
PIECE_BYTES = 256 << 10


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
    services = services_of(request)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        message = "A file must be sent with 'Content-Type: multipart/form-data'."
        raise HTTPRefusal(400, message, "unsupported_media_type")
    content_type = request.headers["content-type"]
    fields, files = await services.body_receiver.read(request, lambda body: _form(content_type, body))
    if "file" not in files:
        raise MissingParameter("file")
    if fields.get("purpose") != "batch":
        raise InvalidParameter("purpose", "'purpose' must be 'batch'.")
    name, content = files["file"]
    file = new_file(name, content, "batch")
    await services.store.put_all(caller_of(request).name, items_of(file, content))
    return json_response(msgspec.to_builtins(file), {})


def new_file(name: str, content: bytes, purpose: str) -> FileObject:
    """A new file object with a fresh id."""
    return FileObject(
        id=f"file-{uuid.uuid4().hex}",
        bytes=len(content),
        created_at=int(time.time()),
        filename=name[:MAX_NAME],
        purpose=purpose,
    )


def items_of(file: FileObject, content: bytes) -> list[StoredItem]:
    """The store items of a file."""
    return [StoredItem(CONTENT, file.id, content), StoredItem(KIND, file.id, msgspec.json.encode(file))]


async def list_files(request: Request) -> Response:
    kept = await services_of(request).store.list(KIND, caller_of(request).name)
    purpose = request.query_params.get("purpose")
    files: list[dict[str, Any]] = [file for _, file in decoded(KIND, kept, dict)]
    return json_response(page(request, [file for file in files if purpose in (None, file["purpose"])]), {})


async def retrieve_file(request: Request) -> Response:
    return json_response(msgspec.json.decode(await _value(request, KIND)), {})


async def file_content(request: Request) -> Response:
    return Response(await _value(request, CONTENT), media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    await _value(request, KIND)
    services, owner, name = services_of(request), caller_of(request).name, request.path_params["file_id"]
    await services.store.delete(CONTENT, name, owner)
    await services.store.delete(KIND, name, owner)
    return json_response({"id": name, "object": "file", "deleted": True}, {})


ENDPOINTS = [
    Endpoint("POST", "/v1/files", create_file, "Keep a file for a batch"),
    Endpoint("GET", "/v1/files", list_files, "List the files"),
    Endpoint("GET", "/v1/files/{file_id}", retrieve_file, "Describe a file"),
    Endpoint("GET", "/v1/files/{file_id}/content", file_content, "The bytes of a file"),
    Endpoint("DELETE", "/v1/files/{file_id}", delete_file, "Forget a file"),
]


async def _value(request: Request, kind: str) -> bytes:
    name = request.path_params["file_id"]
    value = await services_of(request).store.get(kind, name, caller_of(request).name)
    if value is None:
        raise NotFound(f"There is no file '{printable(name)}'.", param="file_id")
    return value


def _form(content_type: str, body: bytes) -> tuple[dict[str, str], dict[str, tuple[str, bytes]]]:
    """Parse a multipart form into fields and (file name, content) by field. Raises ``HTTPRefusal``."""
    fields: dict[str, str] = {}
    files: dict[str, tuple[str, bytes]] = {}
    num_parts = 0

    def count_part() -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts > MAX_PARTS:
            raise HTTPRefusal(400, f"The form in the body has more than {MAX_PARTS} parts.", "invalid_form")

    def on_field(field: Field) -> None:
        count_part()
        fields[_text(field.field_name)] = _text(field.value)

    def on_file(file: File) -> None:
        count_part()
        file.file_object.seek(0)
        files[_text(file.field_name)] = (_text(file.file_name), file.file_object.read())

    # The body is in memory already, so do not spool files to disk.
    limits = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
    try:
        parser = create_form_parser({"Content-Type": content_type.encode()}, on_field, on_file, config=limits)
        for start in range(0, len(body), PIECE_BYTES):
            parser.write(body[start : start + PIECE_BYTES])
        parser.finalize()
    except HTTPRefusal:
        raise
    except (FormParserError, ValueError):
        raise HTTPRefusal(400, "The form in the body is not valid.", "invalid_form") from None
    return fields, files


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
