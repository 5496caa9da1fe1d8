"""KV events over ZeroMQ in vLLM's wire format: ``--kv-events-config``.

A PUB socket sends a message for each engine step that changed the cache: topic, sequence number (8 bytes, big-endian)
and a batch in msgpack. A batch is the array ``[Unix time, events, data-parallel rank]``; events are maps whose key
``type`` is the class's name. A ROUTER socket replays: it answers a sequence number with the batches from there on that
are still in the buffer, and then with number -1 and no payload. Format: ``vllm/distributed/kv_events.py`` of vLLM 0.28.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.cache.kv_events import KVEvent, Stored
from octavo.errors import ConfigError

if TYPE_CHECKING:
    import zmq

END = (-1).to_bytes(8, "big", signed=True)
MAX_BUFFER_BYTES = 64 << 20
"""Of the batches that are kept for replay."""
MAX_REQUEST_BYTES = 1024
"""Of a message that a peer sends: a replay request, or a topic."""
MAX_QUEUED_REQUESTS = 16
"""Replay requests of a peer that wait; it cannot send more."""
MOST_WAITING = 2**31 - 2
"""ZMQ counts in 32 bits, and one more."""
MEDIUM = "GPU"
"""vLLM's name for the main cache, on any device."""

logger = logging.getLogger("octavo.server")


class KVEventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The fields of vLLM's ``KVEventsConfig``."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address to bind; the port grows by the data-parallel rank."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches kept for replay, as far as they have fewer than ``MAX_BUFFER_BYTES``."""
    hwm: int = 10_000
    """Batches queued for a subscriber that is slow; further ones are dropped for it, and it may ask for a replay."""
    max_queue_size: int = 100_000
    """Batches that wait to be encoded; further ones are dropped, which leaves a gap in the sequence numbers."""
    topic: str = ""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Blocks were cached, each after the one before it, the first after ``parent_block_hash``."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of a message."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def parse_kv_events_config(text: str) -> KVEventsConfig | None:
    """The settings; ``None`` when they turn events off. Raises ``ConfigError``."""
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"kv_events_config: {error}") from None
    if config.publisher not in ("zmq", "null"):
        raise ConfigError(f"kv_events_config: publisher {config.publisher!r} is not one of zmq, null")
    if not all(0 < size <= MOST_WAITING for size in (config.buffer_steps, config.hwm, config.max_queue_size)):
        raise ConfigError(f"kv_events_config: buffer_steps, hwm and max_queue_size must be from 1 to {MOST_WAITING}")
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


def as_events(changes: Iterable[KVEvent]) -> list[Event]:
    """vLLM's events for a step's changes; neighbouring blocks of one prompt are joined into one event."""
    events: list[Event] = []
    for change in changes:
        last = events[-1] if events else None
        if not isinstance(change, Stored):
            if isinstance(last, BlockRemoved):
                last.block_hashes.append(change.hash)
            else:
                events.append(BlockRemoved([change.hash], MEDIUM))
        elif isinstance(last, BlockStored) and change.parent == last.block_hashes[-1]:
            last.block_hashes.append(change.hash)
            last.token_ids += change.tokens
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            keys: list[tuple[str, ...] | None] | None = [(change.salt,)] if change.salt else None
            tokens = list(change.tokens)
            parent = change.parent or None
            events.append(BlockStored([change.hash], parent, tokens, len(tokens), None, MEDIUM, None, keys))
    return events


class KVEventPublisher:
    """A ``KVEventSink`` that publishes. All sockets but one end of the queue belong to its thread."""

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        """Raises ``ConfigError`` without pyzmq, and for an address that cannot be bound."""
        try:
            import zmq
        except ImportError:
            raise ConfigError("kv_events_config needs pyzmq: pip install 'octavo[kv-events]'") from None
        self._zmq = zmq
        self._config = config
        self._rank = rank
        self._number = 0
        self._buffer: deque[tuple[int, zmq.Frame]] = deque()
        self._num_buffered = 0
        """Bytes of the payloads in the buffer."""
        self._context = zmq.Context()
        queue = f"inproc://kv-events-{rank}"
        self._inbox = self._socket(zmq.PULL, queue, config.max_queue_size)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(config.max_queue_size)
        self._outbox.connect(queue)
        self._publisher = self._socket(zmq.PUB, shifted(config.endpoint, rank), config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            # One replay may be queued for a peer. Without ``ROUTER_MANDATORY``, more would be dropped only one by one.
            address = shifted(config.replay_endpoint, rank)
            options: dict[int, int] = {zmq.ROUTER_MANDATORY: 1, zmq.RCVHWM: MAX_QUEUED_REQUESTS}
            self._replay = self._socket(zmq.ROUTER, address, config.buffer_steps + 1, options)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def add(self, events: list[KVEvent]) -> None:
        """Publish a step's events."""
        self._send(as_events(events))

    def clear(self) -> None:
        """Publish that the cache was lost with its engine process."""
        self._send([AllBlocksCleared()])

    def close(self) -> None:
        """Publish what is queued, and free the addresses."""
        with contextlib.suppress(self._zmq.Again):
            self._outbox.send(b"", self._zmq.NOBLOCK)
        self._thread.join(1)
        self._outbox.close(0)
        self._context.destroy(linger=200)

    def _send(self, events: list[Event]) -> None:
        number, self._number = self._number, self._number + 1
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events, self._rank))
        try:
            self._outbox.send_multipart((number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
        except self._zmq.Again:
            logger.warning("batch %d of KV events is dropped: too many are queued", number)

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._inbox, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._inbox in ready:
                frames = self._inbox.recv_multipart(copy=False)
                if len(frames) == 1:
                    return
                number, payload = frames
                self._keep(int.from_bytes(number.bytes, "big"), payload)
                self._publisher.send_multipart((self._config.topic.encode(), number, payload), copy=False)

    def _keep(self, number: int, payload: zmq.Frame) -> None:
        """Buffer a batch. What is queued for peers are references to it."""
        self._buffer.append((number, payload))
        self._num_buffered += len(payload)
        while len(self._buffer) > self._config.buffer_steps or self._num_buffered > MAX_BUFFER_BYTES:
            self._num_buffered -= len(self._buffer.popleft()[1])

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer one replay request: identity, empty frame, first sequence number. The answer ends early for a peer
        that has not read the one before."""
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) > 8:
            return
        first = int.from_bytes(rest[1], "big")
        try:
            for number, payload in self._buffer:
                if number >= first:
                    frames = (client, b"", number.to_bytes(8, "big"), payload)
                    replay.send_multipart(frames, self._zmq.NOBLOCK, copy=False)
            replay.send_multipart((client, b"", END, b""), self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:
            if error.errno not in (self._zmq.EAGAIN, self._zmq.EHOSTUNREACH):
                raise

    def _socket(self, kind: int, address: str, limit: int, options: Mapping[int, int] | None = None) -> Any:
        """A bound socket that queues ``limit`` messages for each peer."""
        socket = self._context.socket(kind)
        socket.set_hwm(limit)
        for option, value in (options or {}).items():
            socket.setsockopt(option, value)
        if address.partition(":")[0] != "inproc":
            socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events_config: cannot listen on {address}: {error}") from None
        return socket


def shifted(address: str, rank: int) -> str:
    """``address`` with its port, if any, increased by ``rank``. Raises ``ConfigError``."""
    head, colon, port = address.rpartition(":")
    if address.startswith("tcp://"):
        if not port.isdigit():
            raise ConfigError(f"kv_events_config: {address!r} has no port")
        return f"{head}{colon}{int(port) + rank}"
    return f"{address}-{rank}" if rank else address
