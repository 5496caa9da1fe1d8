"""The protocol between the front process and the engine process.

Messages are msgpack arrays, each in a frame: four bytes of length (unsigned, little endian), then that many
bytes. They are sent over a private socket pair that the engine process inherits, so there is no listener and
no authentication. Each message carries the generation of its engine process (1 for the first, incremented by each
restart); messages of other generations are dropped.
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
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.request_events import Event
from octavo.types import EngineInfo, EngineStats, MemoryPart, Output, Request, WeightOrder

MAX_FRAME_BYTES = 1 << 30
"""A text of 32,768 tokens has vectors of 512 MiB, with 4,096 numbers each."""
HEADER = struct.Struct("<I")


class FrameError(OctavoError, ValueError):
    """An invalid frame or message. The connection cannot be used any more."""


class Message(msgspec.Struct, array_like=True):
    """What every message has."""

    generation: int


# --- front to engine ---


class Start(Message, tag="start"):
    """The first message: the configuration. ``config`` is ``octavo.config.to_flat`` of an ``EngineConfig``."""

    config: dict[str, Any]
    log_level: str = "WARNING"
    log_format: str = "text"
    expects_grammars: bool = False
    """Whether requests with a grammar wait, or are likely: the engine is ready for them when it is ready."""


class Submit(Message, tag="submit", gc=False):
    """A new request, or an unfinished one of an earlier generation, with its output so far."""

    request: Request


class Abort(Message, tag="abort", gc=False):
    """End a request; no output is sent for it."""

    request_id: int


class Ping(Message, tag="ping", gc=False):
    """Check that an idle engine responds; it answers with a ``StepDone`` without outputs."""

    wants_view: bool = False
    """Whether the next report shall have a view of the KV cache."""


class Stop(Message, tag="stop", gc=False):
    """Shut the process down cleanly."""


class LoadAdapter(Message, tag="load_adapter", gc=False):
    """Load an adapter from a folder; answered with an ``AdapterDone``."""

    name: str
    path: str


class UnloadAdapter(Message, tag="unload_adapter", gc=False):
    """Unload an adapter that no live request uses; answered with an ``AdapterDone``."""

    name: str


class Sleep(Message, tag="sleep", gc=False):
    """Free the device's memory, as there is no request left; answered with a ``SleepDone``. Until all is awake,
    no request may follow; once its weights are, ``OrderWeights`` may."""


class Wake(Message, tag="wake", gc=False):
    """Undo ``Sleep`` for some parts of the memory; answered with a ``SleepDone``."""

    parts: list[MemoryPart]


class Settle(Message, tag="settle", gc=False):
    """Answer with ``Settled``, once all messages before this one were handled."""

    clears_cache: bool = False
    """Whether to drop what the prefix cache holds of ended requests."""


class OrderSessions(Message, tag="order_sessions", gc=False):
    """What is asked about sessions; answered with a ``SessionsDone``."""

    order: SessionOrder


class OrderWeights(Message, tag="order_weights"):
    """What a trainer asks for; answered with a ``WeightsDone``."""

    order: WeightOrder


class Pace(Message, tag="pace", gc=False):
    """Compute so many further steps and then hold, though there is work; ``None``: go on."""

    steps: int | None


ToEngine = (
    Start
    | Submit
    | Abort
    | Ping
    | Stop
    | LoadAdapter
    | UnloadAdapter
    | Settle
    | Sleep
    | Wake
    | OrderSessions
    | OrderWeights
    | Pace
)


# --- engine to front ---


class Ready(Message, tag="ready"):
    """The engine is built and takes requests."""

    info: EngineInfo


class BuildFailed(Message, tag="failed"):
    """The engine cannot be built. ``kind`` is the name of an error class; the process ends after this."""

    kind: str
    message: str

    def as_error(self) -> OctavoError:
        return START_ERRORS.get(self.kind, OctavoError)(self.message)


class Refusal(msgspec.Struct, array_like=True, gc=False):
    """A request that the engine rejected. ``kind`` is the name of an error class."""

    request_id: int
    kind: str
    message: str
    param: str | None = None

    def as_error(self) -> RequestError:
        if self.kind == InvalidParameter.__name__ and self.param is not None:
            return InvalidParameter(self.param, self.message)
        return REFUSALS.get(self.kind, RequestFailed)(self.message, param=self.param)


class StepDone(Message, tag="step", gc=False):
    """The report of one step."""

    outputs: list[Output]
    stats: EngineStats
    refusals: list[Refusal] = []
    events: list[Event] = []
    kv_events: list[KVEvent] = []
    cache_view: CacheView | None = None
    """If a ``Ping`` asked for it, and there is a cache."""


class AdapterDone(Message, tag="adapter", gc=False):
    """An adapter was loaded or unloaded, or ``error`` says why not."""

    name: str
    error: str = ""


class Settled(Message, tag="settled", gc=False):
    """The answer to ``Settle``: every output that was under way is before it."""


class SessionsDone(Message, tag="sessions"):
    """The answer to ``OrderSessions``."""

    report: SessionReport


class SleepDone(Message, tag="slept", gc=False):
    """The answer to ``Sleep`` or ``Wake``: it was done, or ``error`` says why not."""

    is_asleep: bool
    """Whether it answers ``Sleep``."""
    error: str = ""


class WeightsDone(Message, tag="weights", gc=False):
    """The answer to ``OrderWeights``: it was done, or ``error`` says why not."""

    error: str = ""
    is_busy: bool = False
    """Whether weights are still being received."""
    checksums: dict[str, str] = {}
    """The answer to ``ChecksumWeights``."""


FromEngine = Ready | BuildFailed | StepDone | AdapterDone | SleepDone | Settled | SessionsDone | WeightsDone

START_ERRORS: dict[str, type[OctavoError]] = {kind.__name__: kind for kind in (ConfigError, CheckpointError)}
REFUSALS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (ContextLengthExceeded, RequestTooLarge, QueueFull, Unavailable, RequestFailed)
}

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def pack(message: ToEngine | FromEngine) -> bytes:
    """Encode a message as a frame. Raises ``FrameError`` if it is too long or not encodable."""
    try:
        payload = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a {type(message).__name__} message cannot be encoded: {error}") from None
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a {type(message).__name__} message of {len(payload)} bytes; {MAX_FRAME_BYTES} are allowed")
    return HEADER.pack(len(payload)) + payload


def unpack_to_engine(payload: bytes) -> ToEngine:
    """Decode a frame received by the engine process. Raises ``FrameError``."""
    try:
        message: ToEngine = _to_engine.decode(payload)
        return message
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"not a message to the engine: {error}") from None


def unpack_from_engine(payload: bytes) -> FromEngine:
    """Decode a frame received by the front process. Raises ``FrameError``."""
    try:
        message: FromEngine = _from_engine.decode(payload)
        return message
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"not a message from the engine: {error}") from None


class FrameReader:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the payloads of all completed frames. Raises ``FrameError`` on a bad length."""
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
