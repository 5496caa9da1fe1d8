"""Multipart forms (RFC 7578), read while they arrive: the file of an upload, and fields beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from octavo_server.http.error_responses import HTTPRefusal

MEDIA_TYPE = "multipart/form-data"
MAX_PARTS = 32
"""Most parts of a multipart form; parsing a part costs far more than its bytes suggest."""
MAX_FIELD_BYTES = 64 << 10
"""Of all fields that are not files."""
PLAIN_ENCODINGS = (b"binary", b"8bit", b"7bit")


class MultipartForm:
    """The form in the body of a request: fields are kept, the part ``file`` is written to ``content``.

    Every method raises ``HTTPRefusal`` for a form that is not valid; so is a body that is no form.
    """

    def __init__(self, request: Request, content: BinaryIO) -> None:
        content_type = request.headers.get("content-type", "")
        if not content_type.lower().startswith(MEDIA_TYPE):
            message = f"A file must be sent with 'Content-Type: {MEDIA_TYPE}'."
            raise HTTPRefusal(400, message, "unsupported_media_type")
        self.fields: dict[str, bytearray] = {}
        self.file_name: str | None = None
        """``None`` until there is a part ``file``."""
        self._content = content
        self._num_parts = self._num_field_bytes = 0
        self._name, self._value = bytearray(), bytearray()
        """Of a header."""
        self._headers: dict[bytes, bytes] = {}
        self._write: Callable[[bytes], Any] = len
        _, options = parse_options_header(content_type)
        callbacks: Any = {
            "on_part_begin": self._headers.clear,
            "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_part,
            "on_part_data": lambda data, start, end: self._write(data[start:end]),
        }
        with _valid_form():
            self._parser = MultipartParser(options[b"boundary"], callbacks)

    def take(self, part: bytes) -> None:
        """Take the next bytes of the body."""
        with _valid_form():
            self._parser.write(part)

    def finish(self) -> None:
        """Check that the form is complete."""
        with _valid_form():
            self._parser.finalize()

    def _end_header(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value).strip()
        self._name.clear()
        self._value.clear()

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid_form(f"has more than {MAX_PARTS} parts")
        _, options = parse_options_header(self._headers.get(b"content-disposition", b"").decode("latin-1"))
        name, file_name = _text(options[b"name"]), options.get(b"filename")
        if self._headers.get(b"content-transfer-encoding", b"binary").lower() not in PLAIN_ENCODINGS:
            raise _invalid_form("has a part with a 'Content-Transfer-Encoding'")
        if file_name is None:
            field = self.fields[name] = bytearray()
            self._write = lambda data: self._add(field, data)
        elif name != "file":
            self._write = len  # which keeps nothing
        elif self.file_name is not None:
            raise _invalid_form("has more than one part 'file'")
        else:
            self.file_name = _text(file_name)
            self._write = self._content.write

    def _add(self, field: bytearray, data: bytes) -> None:
        self._num_field_bytes += len(data)
        if self._num_field_bytes > MAX_FIELD_BYTES:
            raise _invalid_form(f"has fields of more than {MAX_FIELD_BYTES} bytes")
        field += data


@contextlib.contextmanager
def _valid_form() -> Iterator[None]:
    try:
        yield
    except HTTPRefusal:
        raise
    except (FormParserError, ValueError, KeyError):
        raise _invalid_form("is not valid") from None


def _invalid_form(reason: str) -> HTTPRefusal:
    return HTTPRefusal(400, f"The form in the body {reason}.", "invalid_form")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
