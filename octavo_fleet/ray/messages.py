"""What the HTTP side of a fleet and its engines exchange, in msgpack.

Times are relative to the arrival of the request, as no two machines have the same clock.
"""

from __future__ import annotations

import msgspec

from octavo.errors import RequestError
from octavo.telemetry.cache_view import SessionOrder, SessionReport
from octavo.types import EngineInfo, EngineStats, Output, Request
from octavo_server.engines.wire import Refusal


class AnswerPart(msgspec.Struct, array_like=True, gc=False):
    """Part of the answer to one request; the last part has a finish reason, or ``refusal``."""

    replica: str
    """Id of the engine."""
    outputs: list[Output]
    stats: EngineStats
    refusal: Refusal | None = None


def refusal_of(request_id: int, error: RequestError) -> Refusal:
    """An error as a message; ``Refusal.as_error`` is the inverse."""
    return Refusal(request_id, type(error).__name__, error.message, error.param)


# Functions, as Ray pickles what refers to them, and decoders cannot be pickled.


def encode(message: Request | AnswerPart | EngineInfo | SessionOrder | SessionReport) -> bytes:
    """A message in msgpack."""
    return msgspec.msgpack.encode(message)


def decode_request(data: bytes) -> Request:
    return msgspec.msgpack.decode(data, type=Request)


def decode_answer(data: bytes) -> AnswerPart:
    return msgspec.msgpack.decode(data, type=AnswerPart)


def decode_order(data: bytes) -> SessionOrder:
    return msgspec.msgpack.decode(data, type=SessionOrder)


def decode_report(data: bytes) -> SessionReport:
    return msgspec.msgpack.decode(data, type=SessionReport)


def decode_info(data: bytes) -> EngineInfo:
    return msgspec.msgpack.decode(data, type=EngineInfo)
