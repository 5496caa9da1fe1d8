"""Request bodies: received within bounds of size and time, and decoded strictly into typed values.

Bodies are bounded singly and in total, and large ones decoded in a thread. Where API keys compete for room or for time,
each has a share. Fields that are not used are not decoded.

msgspec rejects NaN, Infinity, bad UTF-8 and lone surrogates, and does not coerce ``true`` or ``"1"`` to 1. Fields are
decoded one by one, so that an error can name its field; ``null`` counts as absent, as in the OpenAI API.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request

from octavo.errors import InvalidParameter, RequestError, RequestTooLarge, Unavailable
from octavo_server.http.connection_limits import ByteBudget, Share
from octavo_server.http.error_responses import (
    RETRY_AFTER_SECONDS,
    HTTPRefusal,
    MissingParameter,
    UnsupportedParameter,
    printable,
)
from octavo_server.tenants.api_keys import caller_of
from octavo_server.tenants.turn_queue import Places

PIECE_BYTES = 64 << 10
"""Most bytes looked at, or decompressed, at a time."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = tuple({91: 1, 123: 1, 93: -1, 125: -1}.get(byte, 0) for byte in range(256))


class Size(NamedTuple):
    """Counts of syntax outside of strings; meaningful only for valid JSON."""

    num_values: int
    """Number of commas, which approximates the number of values."""
    num_members: int
    """Members of objects."""
    num_containers: int
    """Objects, arrays, and members of objects."""
    depth: int


def measure(text: bytes, max_values: int = sys.maxsize, max_containers: int = sys.maxsize) -> Size:
    """The size of ``text``, or of a prefix that already exceeds one of the limits, without decoding it.

    Two bytes of JSON can decode to an object of a hundred bytes, in one call that holds the GIL. This scans the text in
    pieces, so that other threads run in between.
    """
    num_values = num_members = num_containers = depth = level = 0
    for piece in _outside_strings(text):
        num_values += piece.count(b",")
        num_members += (more := piece.count(b":"))
        num_containers += piece.count(b"[") + piece.count(b"{") + more
        if num_values > max_values or num_containers > max_containers:
            break
        if brackets := piece.translate(None, _NO_BRACKETS):
            levels = list(itertools.accumulate(map(_STEPS.__getitem__, brackets), initial=level))
            level, depth = levels[-1], max(depth, *levels)
    return Size(num_values, num_members, num_containers, depth)


def num_members(text: bytes) -> int:
    """Members of all objects in ``text``, which is valid JSON."""
    return sum(piece.count(b":") for piece in _outside_strings(text))


def repeated_name(text: bytes) -> str:
    """The first name that an object in ``text`` has twice, or ""; slow."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise _Repeated(next(name for name in names if names.count(name) > 1))

    try:
        json.loads(text, object_pairs_hook=check)
    except _Repeated as repeated:
        return str(repeated)
    return ""


class _Repeated(Exception):
    pass


def _outside_strings(text: bytes) -> Iterator[bytes]:
    if len(text) <= PIECE_BYTES:
        yield b" ".join(text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
        return
    is_inside = False
    rest = b""
    for start in range(0, len(text), PIECE_BYTES):
        piece = (rest + text[start : start + PIECE_BYTES]).replace(rb"\\", b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(rb"\"", b"").split(b'"')
        yield b" ".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


SMALL_BYTES = 32 << 10
"""Bodies up to this size decode in under a millisecond, whatever their content."""
MAX_DEPTH = 64
MAX_VALUES = 1 << 20
"""Most JSON values in addition to one full-context prompt of token ids; decoding them holds the GIL for about 40 ms."""
MAX_CONTAINERS = 1 << 17
"""Most objects, arrays and object members in addition to ``CONTAINERS_PER_TOKEN`` for each token of the context: a
message, part or tool is a few of them and at least one token."""
CONTAINERS_PER_TOKEN = 4
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FEW_DIGITS = 15
"""Numbers of as many digits are held by double precision, unless they are too near to zero or too large."""
ASKS_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

SCHEMA_FIELDS = frozenset(
    ("format", "grammar", "guided_json", "json_schema", "output_config", "output_format", "parameters")
) | {"generationConfig", "response_format", "sampling_params", "structured_outputs", "text", "tools"}
"""Fields that may hold a JSON schema, whose numbers must not be rounded."""

NO_FORM: dict[str, tuple[bytes, ...]] = {
    **dict.fromkeys(("ebnf", "grammar", "json_schema", "output_format", "regex", "response_format"), (b"false", b"[]")),
    **dict.fromkeys(("guided_grammar", "guided_json", "guided_regex", "structured_outputs"), (b"false", b"[]")),
    "guided_choice": (b"false",),  # an empty list of choices is a mistake
}
"""Values that count as absent, although of another type, of the fields with the form of an answer: nobody asks for
one."""

GATHERED = "sampling"
"""Field of bodies with the values of options."""

T = TypeVar("T", bound=msgspec.Struct)
Decoded = TypeVar("Decoded")

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any_list = msgspec.json.Decoder(list[msgspec.Raw] | None)
_any_value = msgspec.json.Decoder()


class MalformedJSON(RequestError):
    """The body is not a JSON object."""

    code = "invalid_json"


class BodyDecoder(Generic[T]):
    """Reads JSON objects as ``kind``.

    ``refused`` names API fields that this server does not implement, each with its values that have no effect (null,
    false, "", [] and {} never have one); any other value is an error. ``accepted`` names fields without an effect on
    the answer. ``ignored`` names fields that are ignored and reported to the client, with their neutral values.
    ``options`` names further fields with types and defaults; their values are together in the field ``sampling``.
    ``bodies`` names a field with a list of bodies, each of which may have as many containers as one alone.
    ``rename`` makes a field's name of what clients may write.
    """

    def __init__(
        self,
        kind: type[T],
        refused: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
        accepted: frozenset[str] = frozenset(),
        ignored: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
        options: Mapping[str, tuple[type[int] | type[float] | type[bool], Any]] = MappingProxyType({}),
        bodies: str | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        self.kind = kind
        self.refused = refused
        self.accepted = accepted
        self.ignored = ignored
        self.options = options
        self.bodies = bodies
        self.rename = rename
        own = get_type_hints(kind, include_extras=True)
        hints: dict[str, Any] = {name: hint for name, hint in own.items() if name != GATHERED}
        hints |= {name: kind for name, (kind, _) in options.items()}
        self._hints = hints
        self.decoders = {
            name: msgspec.json.Decoder(hint | None, float_hook=exact_float if name in SCHEMA_FIELDS else None)
            for name, hint in hints.items()
        }
        self.required = [field.name for field in msgspec.structs.fields(kind) if field.required]

    def read(self, body: bytes, max_model_len: int = 0) -> tuple[T, list[str]]:
        """The value, and the names of ignored fields: unknown ones, which are not decoded, and those of ``ignored``
        with a value that would have an effect. Raises ``RequestError``."""
        if body.startswith(BYTE_ORDER_MARK):
            body = body[len(BYTE_ORDER_MARK) :]
        if not body or body.isspace():
            raise MalformedJSON("The body is empty; it must be a JSON object.")
        is_small = len(body) <= SMALL_BYTES and body.count(b"[") + body.count(b"{") <= MAX_DEPTH
        max_containers = MAX_CONTAINERS + CONTAINERS_PER_TOKEN * max_model_len
        max_of_all = max_containers if self.bodies is None else sys.maxsize
        size = None if is_small else _bounded_size(body, MAX_VALUES + max_model_len, max_of_all)
        fields = {self.rename(name): raw for name, raw in _split(body).items()}
        if size is not None and size.depth > MAX_DEPTH + 1:
            raise _too_deep(next(name for name, raw in fields.items() if measure(bytes(raw)).depth > MAX_DEPTH))
        texts = list(fields.items())
        if self.bodies is not None and self.bodies in fields:
            texts = [each for each in texts if each[0] != self.bodies]
            texts += _bounded_parts(self.bodies, fields[self.bodies], max_containers)
        num_left = (num_members(body) if size is None else size.num_members) - len(fields)
        _check_names(body, texts, num_left)
        values: dict[str, Any] = {}
        gathered: dict[str, Any] = {}
        ignored_fields: list[str] = []
        for name, raw in fields.items():
            decoder = self.decoders.get(name)
            if name in self.refused:
                if _asks(_decode(name, raw, _any_value), self.refused[name]):
                    raise UnsupportedParameter(name)
            elif bytes(raw) in NO_FORM.get(name, ()):
                continue
            elif decoder is not None:
                value = _decode(name, raw, decoder)
                if value is not None:
                    (gathered if name in self.options else values)[name] = value
            elif name not in self.accepted and (
                name not in self.ignored or _asks(_decode(name, raw, _any_value), self.ignored[name])
            ):
                ignored_fields.append(name)
        for name in self.required:
            if name not in values:
                raise MissingParameter(name)
        if gathered:
            # In an order of its own, as a body's digest must not depend on that of the client.
            values[GATHERED] = {name: gathered[name] for name in self.options if name in gathered}
        return self.kind(**values), ignored_fields

    @cached_property
    def documented(self) -> type[msgspec.Struct]:
        """``kind`` with ``options`` as fields of their own."""
        if not self.options:
            return self.kind
        fields: list[Any] = [
            (field.name, self._hints[field.name], *_default_of(field))
            for field in msgspec.structs.fields(self.kind)
            if field.name != GATHERED
        ]
        fields += [(name, kind | None, default) for name, (kind, default) in self.options.items()]
        return msgspec.defstruct(self.kind.__name__, fields, kw_only=True)


def _default_of(field: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    """Nothing for a required field, else its default as ``msgspec.defstruct`` takes it."""
    if field.required:
        return ()
    if field.default_factory is not msgspec.NODEFAULT:
        return (msgspec.field(default_factory=field.default_factory),)
    return (field.default,)


def exact_float(digits: str) -> float:
    """The number that ``digits`` write. Raises ``ValueError`` when floating point would round it."""
    number = float(digits)
    if len(digits) <= FEW_DIGITS and math.isfinite(number) and number:
        return number
    try:
        is_exact = math.isfinite(number) and Decimal(repr(number)) == Decimal(digits)
    except ArithmeticError:  # an exponent that Decimal does not hold
        is_exact = False
    if not is_exact:
        raise ValueError(f"the number {digits[:40]} has more digits than double precision holds")
    return number


def _asks(value: Any, defaults: tuple[Any, ...]) -> bool:
    return value not in ASKS_NOTHING and value not in defaults


def _bounded_size(text: bytes, max_values: int, max_containers: int, subject: str = "The body") -> Size:
    """The size of ``text``. Raises ``RequestTooLarge``, before decoding, when decoding would cost too much."""
    size = measure(text, max_values, max_containers)
    if size.num_values > max_values:
        raise RequestTooLarge(f"{subject} has more than {max_values} values, the most that this server accepts.")
    if size.num_containers > max_containers:
        message = (
            f"{subject} has more than {max_containers} objects, arrays and fields, the most that this server accepts."
        )
        raise RequestTooLarge(message)
    return size


def _bounded_parts(name: str, raw: msgspec.Raw, max_containers: int) -> Iterator[tuple[str, msgspec.Raw]]:
    """The elements of the list ``raw``, each with ``name``. Raises ``RequestTooLarge`` for the first that has more
    containers than that."""
    for place, part in enumerate(_decode(name, raw, _any_list) or ()):
        if len(bytes(part)) > SMALL_BYTES:
            _bounded_size(bytes(part), sys.maxsize, max_containers, f"'{name}[{place}]'")
        yield name, part


def _split(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _raw_fields.decode(body)
    except RecursionError:
        raise MalformedJSON(f"The body is nested deeper than {MAX_DEPTH} levels.") from None
    except msgspec.ValidationError:
        raise MalformedJSON("The body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None
    except UnicodeDecodeError:
        raise MalformedJSON("The body is not valid UTF-8.") from None


def _check_names(body: bytes, texts: Iterable[tuple[str, msgspec.Raw]], num_left: int) -> None:
    """Raise ``InvalidParameter`` if an object of the body, at any depth, has a name twice.

    ``texts`` are the values of its fields, or parts of one, and ``num_left`` the members that these should have.
    Decoders differ in which value counts, so another program that checks requests could see another one. Decoding
    drops one of the two, so there are then fewer names than members in the text.
    """
    for name, raw in texts:
        if not num_left:
            return
        text = bytes(raw)
        if text[0] in b"[{" and b":" in text:
            num_left -= _num_names(_decode(name, raw, _any_value))
    if not num_left:
        return
    name = printable(repeated_name(body))
    raise InvalidParameter(name, f"The body has the name '{name}' twice in one object.")


def _num_names(value: Any) -> int:
    """Names of all objects in a decoded value."""
    count = 0
    if type(value) is dict:
        count = len(value)
        value = value.values()
    for each in value:
        if type(each) is dict or type(each) is list:
            count += _num_names(each)
    return count


def _malformed(body: bytes, reason: str) -> MalformedJSON:
    """An error with the byte offset of the syntax error and the last field name before it."""
    place = re.search(r"\(byte (\d+)\)", reason)
    end = int(place.group(1)) if place else len(body)
    names = re.findall(rb'"(\w{1,64})"\s*:', body[max(0, end - 256) : end])
    name = names[-1].decode("ascii", "replace") if names else None
    after = f", after '{name}'" if name else ""
    return MalformedJSON(f"The body is not valid JSON: broken at byte {end}{after}.", param=name)


def _decode(name: str, raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise wrong_type(name, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidParameter(name, f"'{name}' holds text that is not valid Unicode.") from None
    except RecursionError:
        raise _too_deep(name) from None


def wrong_type(name: str, error: msgspec.ValidationError) -> InvalidParameter:
    """What is told of a field ``name`` whose value could not be read as its type."""
    reason, _, path = str(error).partition(" - at `$")
    where = name + path.rstrip("`")
    return InvalidParameter(name, f"Invalid value for '{where}': {reason[:1].lower()}{reason[1:]}.")


def _too_deep(name: str) -> InvalidParameter:
    return InvalidParameter(name, f"'{name}' is nested deeper than {MAX_DEPTH} levels.")


BODY_SECONDS = 60
"""Most seconds for a body to arrive; slower clients would hold memory."""
SPARE_BYTES = 4 << 20
"""Room for other bodies in addition to one of the maximum size."""
MAX_SPOOLED_BYTES = 512 << 20
"""Of all bodies that arrive on disk."""
PART_BYTES = 256 << 10
"""Written to disk at a time."""
FREE_BYTES = 32 << 20
"""Of large bodies that arrive in a second without pauses: some thirty images."""
LEAST_PIECE = 16 << 10
"""Bytes that a piece counts as, at least: small ones take as much time."""
PIECE_SECONDS = 0.002
"""Pause after each piece (64 to 320 KiB) of a large body beyond these, shared by all arriving bodies."""
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
OF_BROWSERS = ("origin", "sec-fetch-site", "referer")
"""Headers of which a browser sends at least one with every request that a page of another site makes it post."""
DECODED = ("gzip", "x-gzip", "deflate")


class BodyPace:
    """Limits the share of the processor that large bodies have, however many connections send them."""

    def __init__(self) -> None:
        self._places = Places(1)
        self._num_free, self._since = float(FREE_BYTES), time.monotonic()

    async def after(self, num_bytes: int, owner: str) -> None:
        """Pause, if need be, after a piece of so many bytes."""
        now = time.monotonic()
        self._num_free = min(FREE_BYTES, self._num_free + (now - self._since) * FREE_BYTES)
        self._num_free -= max(num_bytes, LEAST_PIECE)
        self._since = now
        if self._num_free < 0:
            self._num_free = 0.0
            async with self._places.place(owner):
                await asyncio.sleep(PIECE_SECONDS)


class BodyReceiver:
    """Reads the bodies of an application's requests, each of at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._budget = ByteBudget(max_bytes + SPARE_BYTES)
        self._spooled = ByteBudget(MAX_SPOOLED_BYTES)
        self._pace = BodyPace()
        # One at a time: decoding two at once would hold the GIL twice as long and take twice the memory.
        self._decoding = Places(1)

    async def read_json(self, request: Request, decoder: BodyDecoder[T], max_model_len: int) -> tuple[T, list[str]]:
        """Decode a JSON body with ``decoder``; see ``BodyDecoder.read``. Raises ``RequestError``.

        Other media types are rejected as a defence against cross-site requests: a web page can make a browser post a
        form or plain text to this server, but not JSON. Ollama's clients may send any, as ``curl -d`` does in its
        documentation, unless there is a sign of a browser.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = media_type == "application/json" or media_type.endswith("+json")
        is_ollama = request.url.path.startswith("/api/") and not any(name in request.headers for name in OF_BROWSERS)
        if not is_json and not is_ollama:
            message = "The body must be sent with 'Content-Type: application/json'."
            raise HTTPRefusal(400, message, "unsupported_media_type")
        return await self.read(request, lambda body: decoder.read(body, max_model_len))

    async def read(self, request: Request, decode: Callable[[bytes], Decoded]) -> Decoded:
        """Apply ``decode`` to the body, in a thread unless it is small. Raises ``RequestError``."""
        # A growing buffer per body would fragment the heap.
        pieces: list[bytes] = []
        async with self._received(request, self._budget, pieces.append):
            body = b"".join(pieces)
            pieces.clear()
            if len(body) <= SMALL_BYTES:
                return decode(body)
            async with self._decoding.place(caller_of(request).name):
                return await asyncio.to_thread(decode, body)

    async def spool(self, request: Request, take: Callable[[bytes], None]) -> None:
        """Give ``take``, which keeps it on disk, the body in parts, in a thread. Raises ``RequestError``."""
        part = bytearray()

        def collect(piece: bytes) -> Awaitable[None] | None:
            nonlocal part
            part += piece
            if len(part) < PART_BYTES:
                return None
            whole, part = part, bytearray()
            return asyncio.to_thread(take, bytes(whole))

        async with self._received(request, self._spooled, collect):
            await asyncio.to_thread(take, bytes(part))

    @contextlib.asynccontextmanager
    async def _received(
        self, request: Request, budget: ByteBudget, take: Callable[[bytes], Awaitable[None] | None]
    ) -> AsyncIterator[None]:
        """``take`` has the complete body; it counts towards ``budget`` until the context exits."""
        try:
            async with asyncio.timeout(BODY_SECONDS) as deadline:
                share = budget.share(lambda: deadline.reschedule(0), caller_of(request).name)
                try:
                    await self._receive(request, share, take)
                except BaseException:
                    share.resize(0)
                    raise
                share.settle()
        except TimeoutError:
            if share.is_given_up:
                raise _given_up() from None
            message = f"The body did not arrive within {BODY_SECONDS} seconds."
            raise HTTPRefusal(408, message, "request_timeout") from None
        try:
            yield
        finally:
            share.resize(0)

    async def _receive(self, request: Request, share: Share, take: Callable[[bytes], Awaitable[None] | None]) -> None:
        """Read the body. Raises ``RequestTooLarge`` as soon as its compressed or decompressed size passes the limit."""
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > self._max_bytes:
            raise _too_large(self._max_bytes)
        unpacking = _Unpacking(request.headers.get("content-encoding", ""))
        owner, size = caller_of(request).name, 0
        async for chunk in request.stream():
            for piece in unpacking.pieces(chunk):
                size += len(piece)
                if size > self._max_bytes:
                    raise _too_large(self._max_bytes)
                if (written := take(piece)) is not None:
                    await written
                share.resize(size)
                if share.is_given_up:
                    raise _given_up()
                if size > PIECE_BYTES:
                    await self._pace.after(len(piece), owner)
        unpacking.end()


class _Unpacking:
    """Decoder of a ``Content-Encoding``. Raises ``HTTPRefusal`` if it is unknown."""

    def __init__(self, coding: str) -> None:
        self._decompressor = None
        name = coding.strip().lower()
        if name in DECODED:
            self._decompressor = zlib.decompressobj(GZIP_OR_ZLIB)
        elif name not in ("", "identity"):
            message = (
                f"The body must be sent plainly, or with 'Content-Encoding' gzip or deflate, not {printable(name)}."
            )
            raise HTTPRefusal(415, message, "unsupported_content_encoding")

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        if self._decompressor is None:
            yield chunk
            return
        while chunk and not self._decompressor.eof:
            try:
                yield self._decompressor.decompress(chunk, PIECE_BYTES)
            except zlib.error:
                raise _badly_packed() from None
            chunk = self._decompressor.unconsumed_tail
        if chunk or self._decompressor.unused_data:
            raise _badly_packed()

    def end(self) -> None:
        if self._decompressor is not None and not self._decompressor.eof:
            raise _badly_packed()


def _badly_packed() -> HTTPRefusal:
    return HTTPRefusal(400, "The body is not what its 'Content-Encoding' says, or not all of it.", "invalid_encoding")


def _given_up() -> Unavailable:
    message = "The server is busy: the bodies that are arriving are too large together. Try again shortly."
    return Unavailable(message, retry_after=RETRY_AFTER_SECONDS)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than {max_bytes} bytes, the most that this server accepts.")
