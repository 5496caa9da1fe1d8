"""Strict decoding of JSON bodies into typed values; unused fields are not decoded.

msgspec rejects NaN, Infinity, bad UTF-8 and lone surrogates, and does not coerce ``true`` or ``"1"`` to 1. Fields are
decoded one by one, so that an error can name its field; ``null`` counts as absent, as in the OpenAI API.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec

from octavo.errors import InvalidParameter, RequestError, RequestTooLarge
from octavo_server.http.errors import MissingParameter, UnsupportedParameter, printable

PIECE_BYTES = 64 << 10
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
    ("format", "grammar", "guided_json", "output_config", "output_format", "parameters", "response_format")
) | {"structured_outputs", "text", "tools"}
"""Fields that may hold a JSON schema, whose numbers must not be rounded."""

GATHERED = "sampling"
"""Field of bodies with the values of options."""

T = TypeVar("T", bound=msgspec.Struct)

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
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
    """

    def __init__(
        self,
        kind: type[T],
        refused: Mapping[str, tuple[Any, ...]],
        accepted: frozenset[str],
        ignored: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
        options: Mapping[str, tuple[type[int] | type[float] | type[bool], Any]] = MappingProxyType({}),
    ) -> None:
        self.kind = kind
        self.refused = refused
        self.accepted = accepted
        self.ignored = ignored
        self.options = options
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
        size = None if is_small else _bounded_size(body, max_model_len)
        fields = _split(body)
        if size is not None and size.depth > MAX_DEPTH + 1:
            raise _too_deep(next(name for name, raw in fields.items() if measure(bytes(raw)).depth > MAX_DEPTH))
        _check_names(body, fields, None if size is None else size.num_members)
        values: dict[str, Any] = {}
        gathered: dict[str, Any] = {}
        ignored_fields: list[str] = []
        for name, raw in fields.items():
            decoder = self.decoders.get(name)
            if name in self.refused:
                if _asks(_decode(name, raw, _any_value), self.refused[name]):
                    raise UnsupportedParameter(name)
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

    @property
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


def _bounded_size(body: bytes, max_model_len: int) -> Size:
    """The size of ``body``. Raises ``RequestTooLarge``, before decoding, when decoding would cost too much."""
    max_values = MAX_VALUES + max_model_len
    max_containers = MAX_CONTAINERS + CONTAINERS_PER_TOKEN * max_model_len
    size = measure(body, max_values, max_containers)
    if size.num_values > max_values:
        raise RequestTooLarge(f"The body has more than {max_values} values, the most that this server accepts.")
    if size.num_containers > max_containers:
        message = (
            f"The body has more than {max_containers} objects, arrays and fields, the most that this server accepts."
        )
        raise RequestTooLarge(message)
    return size


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


def _check_names(body: bytes, fields: dict[str, msgspec.Raw], num_all: int | None) -> None:
    """Raise ``InvalidParameter`` if an object of the body, at any depth, has a name twice. ``num_all``: see ``Size``.

    Decoders differ in which value counts, so another program that checks requests could see another one. Decoding
    drops one of the two, so there are then fewer names than members in the text.
    """
    num_left = (num_members(body) if num_all is None else num_all) - len(fields)
    for name, raw in fields.items():
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
        reason, _, path = str(error).partition(" - at `$")
        where = name + path.rstrip("`")
        raise InvalidParameter(name, f"Invalid value for '{where}': {reason[:1].lower()}{reason[1:]}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidParameter(name, f"'{name}' holds text that is not valid Unicode.") from None
    except RecursionError:
        raise _too_deep(name) from None


def _too_deep(name: str) -> InvalidParameter:
    return InvalidParameter(name, f"'{name}' is nested deeper than {MAX_DEPTH} levels.")
