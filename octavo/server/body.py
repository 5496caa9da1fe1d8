"""From the bytes of a request to a typed value, strictly, with every size bounded while it is read.

JSON is decoded by msgspec, which refuses NaN, Infinity, bad UTF-8 and lone surrogates, and never takes ``true``
for 1 or ``"1"`` for 1. Fields are decoded one by one, so that an error can name its field; ``null`` counts as
absent, as in the OpenAI API.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request

from octavo.errors import InvalidParameter, RequestError, RequestTooLarge
from octavo.server.errors import HTTPRefusal, MissingParameter, UnsupportedParameter

BODY_SECONDS = 60
"""A body must have arrived after this long; slower clients would hold memory for nothing."""
MAX_DEPTH = 64
ASKS_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

T = TypeVar("T", bound=msgspec.Struct)

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any_value = msgspec.json.Decoder()


class MalformedJSON(RequestError):
    """The body is not a JSON object."""

    code = "invalid_json"


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, of at most ``limit`` bytes, which must be said to be JSON.

    Other media types are refused: a web page can make a browser post a form or plain text to this server, but not JSON.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPRefusal(400, "The body must be sent with 'Content-Type: application/json'.", "unsupported_media_type")
    return await read_bytes(request, limit)


async def read_bytes(request: Request, limit: int) -> bytes:
    """The whole body, counted while it arrives. Raises ``RequestTooLarge`` as soon as it passes ``limit`` bytes."""
    too_large = RequestTooLarge(f"The body is larger than {limit} bytes, the most that this server accepts.")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPRefusal(408, f"The body did not arrive within {BODY_SECONDS} seconds.", "request_timeout") from None
    return b"".join(chunks)


class BodyReader(Generic[T]):
    """Reads JSON objects as ``kind``.

    ``refused`` names fields that the API defines and this server does not implement, each with the values that
    ask for nothing (null, false, "", [] and {} never do). ``accepted`` names fields without an effect on the answer.
    ``ignored`` names fields that are passed over, and the client is told, with the values that ask for nothing.
    """

    def __init__(
        self,
        kind: type[T],
        refused: Mapping[str, tuple[Any, ...]],
        accepted: frozenset[str],
        ignored: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    ) -> None:
        self.kind = kind
        self.refused = refused
        self.accepted = accepted
        self.ignored = ignored
        hints = get_type_hints(kind, include_extras=True)
        self.decoders = {name: msgspec.json.Decoder(hint | None) for name, hint in hints.items()}
        self.required = [field.name for field in msgspec.structs.fields(kind) if field.required]

    def read(self, body: bytes) -> tuple[T, list[str]]:
        """The value, and the names of fields that are passed over: those that no API defines, and ``ignored`` ones that
        ask for something. Raises ``RequestError``."""
        values: dict[str, Any] = {}
        passed_over: list[str] = []
        may_be_deep = body.count(b"[") + body.count(b"{") > MAX_DEPTH
        for name, raw in _split(body).items():
            decoder = self.decoders.get(name)
            value = _decode(name, raw, decoder or _any_value)
            if may_be_deep and _is_too_deep(value):
                raise _too_deep(name)
            if name in self.refused:
                if _asks(value, self.refused[name]):
                    raise UnsupportedParameter(name)
            elif decoder is not None:
                if value is not None:
                    values[name] = value
            elif name not in self.accepted and (name not in self.ignored or _asks(value, self.ignored[name])):
                passed_over.append(name)
        for name in self.required:
            if name not in values:
                raise MissingParameter(name)
        return self.kind(**values), passed_over


def _asks(value: Any, defaults: tuple[Any, ...]) -> bool:
    return value not in ASKS_NOTHING and value not in defaults


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


def _malformed(body: bytes, reason: str) -> MalformedJSON:
    """Say where JSON is broken, with the name of the last field before that place."""
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


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        children = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [child for items in children for child in items if isinstance(child, dict | list)]
        if not level:
            return False
    return True
