"""What the front process and the engine process say to each other.

Messages are msgpack arrays, each in a frame: four bytes of length (unsigned, little endian), then that many
bytes. They travel over a private socket pair that the engine process inherits, so there is no listener and
nothing to authenticate. Each message carries the generation of the engine process it belongs to: the first
one is 1, a restarted one is one more, and a message of another generation is dropped.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from octavo.cache.kv_events import KVEvent
from octavo.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    InvalidParameter,
    OctavoError,
    QueueFull,
    RequestError,
    RequestFailed,
    RequestTooLarge,
    Unavailable,
)
from octavo.telemetry.events import Event
from octavo.types import EngineInfo, EngineStats, Output, Request

MAX_FRAME_BYTES = 64 << 20
HEADER = struct.Struct("<I")


class FrameError(OctavoError, ValueError):
    """Bytes that are no frame, or a message that is not one of ours. The connection is of no more use."""


# --- front to engine ---


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: what to build. ``config`` is ``octavo.config.to_flat`` of an ``EngineConfig``."""

    generation: int
    config: dict[str, Any]
    log_level: str = "WARNING"


class Submit(msgspec.Struct, tag="submit", array_like=True, gc=False):
    """A new request, or one that an earlier generation left unfinished, with its output so far."""

    generation: int
    request: Request


class Abort(msgspec.Struct, tag="abort", array_like=True, gc=False):
    """Nobody listens to this request any more; no answer is sent."""

    generation: int
    request_id: int


class Ping(msgspec.Struct, tag="ping", array_like=True, gc=False):
    """Ask an idle engine for a sign of life; it answers with a ``StepDone`` of no outputs."""

    generation: int


class Stop(msgspec.Struct, tag="stop", array_like=True, gc=False):
    """End the process in order."""

    generation: int


class LoadAdapter(msgspec.Struct, tag="load_adapter", array_like=True, gc=False):
    """Read an adapter from a folder; answered with an ``AdapterDone``."""

    generation: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", array_like=True, gc=False):
    """Forget an adapter that no request needs; answered with an ``AdapterDone``."""

    generation: int
    name: str


ToEngine = Start | Submit | Abort | Ping | Stop | LoadAdapter | UnloadAdapter


# --- engine to front ---


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is built and takes requests."""

    generation: int
    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot be built. ``kind`` is the name of an error class; the process ends after this."""

    generation: int
    kind: str
    message: str

    def as_error(self) -> OctavoError:
        return START_ERRORS.get(self.kind, OctavoError)(self.message)


class Refusal(msgspec.Struct, array_like=True, gc=False):
    """A request that the engine did not take. ``kind`` is the name of an error class."""

    request_id: int
    kind: str
    message: str
    param: str | None = None

    def as_error(self) -> RequestError:
        if self.kind == InvalidParameter.__name__ and self.param is not None:
            return InvalidParameter(self.param, self.message)
        return REFUSALS.get(self.kind, RequestFailed)(self.message, param=self.param)


class StepDone(msgspec.Struct, tag="step", array_like=True, gc=False):
    """Everything that one step brought, in one message."""

    generation: int
    outputs: list[Output]
    stats: EngineStats
    refusals: list[Refusal] = []
    events: list[Event] = []
    kv_events: list[KVEvent] = []


class AdapterDone(msgspec.Struct, tag="adapter", array_like=True, gc=False):
    """An adapter was loaded or forgotten, or why not."""

    generation: int
    name: str
    error: str = ""


FromEngine = Ready | Failed | StepDone | AdapterDone

START_ERRORS: dict[str, type[OctavoError]] = {kind.__name__: kind for kind in (ConfigError, CheckpointError)}
REFUSALS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (ContextLengthExceeded, RequestTooLarge, QueueFull, Unavailable, RequestFailed)
}

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def pack(message: ToEngine | FromEngine) -> bytes:
    """One message as a frame; raise ``FrameError`` when it is too long or holds what msgpack cannot."""
    try:
        payload = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a {type(message).__name__} message cannot be encoded: {error}") from None
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a {type(message).__name__} message of {len(payload)} bytes; {MAX_FRAME_BYTES} are allowed")
    return HEADER.pack(len(payload)) + payload


def unpack_to_engine(payload: bytes) -> ToEngine:
    """The message in a frame that the engine process got; raise ``FrameError``."""
    try:
        message: ToEngine = _to_engine.decode(payload)
        return message
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"not a message to the engine: {error}") from None


def unpack_from_engine(payload: bytes) -> FromEngine:
    """The message in a frame that the front process got; raise ``FrameError``."""
    try:
        message: FromEngine = _from_engine.decode(payload)
        return message
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"not a message from the engine: {error}") from None


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take what arrived; return the payloads that are now whole. Raise ``FrameError`` on a bad length."""
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are allowed")
            end = start + HEADER.size + length
            if end > len(buffer):
                break
            payloads.append(bytes(memoryview(buffer)[start + HEADER.size : end]))
            start = end
        del buffer[:start]
        return payloads
