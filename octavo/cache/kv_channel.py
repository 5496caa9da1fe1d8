"""Blocks from one server's prefix cache to another's: what a prefill server holds, a decode server fetches, over TCP
or, where both are on one machine, through shared memory.

Messages after the login of ``octavo.system.channel``, whose identities say what keys and values mean::

    server                                client
                            <------       Ask(ticket, keys)
    Have(keys, arena)       ------>       opens the arena, if it can
                            <------       Fetch(ticket, keys, by_memory)
    Batch(offsets, sizes)   ------>       copies what lies there into its own memory
                            <------       Copied()
    or Batch([], sizes) and a frame of each content; and again, as they come from the device, up to the first that is
    gone; then
    Batch([], [])           ------>
                            <------       Release(ticket)

A connection serves one request after another. A server keeps what a batch names until it has heard ``Copied``, or has
waited in vain and closed the connection. So a client uses what it has copied when it hears the next ``Batch``, and not
before: what lies there may have been something else if it was late.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import itertools
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import msgspec
import numpy as np

from octavo.cache.held_blocks import HeldBlocks
from octavo.cache.offload_tiers import Content
from octavo.config import CacheSettings
from octavo.errors import ConfigError
from octavo.system.addresses import split_address
from octavo.system.channel import (
    Channel,
    ChannelError,
    Credentials,
    accepted,
    client_tls,
    connect,
    listen,
    named,
    server_tls,
)
from octavo.system.shared_arena import ArenaHandle, Slot, opened, read_into
from octavo.types import KVTransfer

VERSION = 2
MAX_MESSAGE_BYTES = 8 << 20
"""Of a message, about 200,000 keys; contents have their own size."""
ACCEPT_SECONDS = 0.1
"""Pause after a connection could not be accepted, such as for want of file descriptors."""
IDLE_SECONDS = 60.0
"""After which a server closes a connection that asks for nothing."""
MAX_CONNECTIONS = 128
NUM_FETCHERS = 8
"""Prompts that are fetched at once."""
NUM_COPIERS = 4
"""Threads that copy contents out of shared memory."""
LEAST_SHARE_BYTES = 2 << 20
"""That one of them copies, of several."""
BATCH_BYTES = 32 << 20
"""Of contents that are fetched together; one that is larger is alone."""
LEAST_RATE = 1 << 20
"""Least bytes per second of a transfer, which may take ``kv_transfer_timeout`` besides; a slower one is given up, and
the prompt is computed here."""
REST_SECONDS = 5.0
"""For which a server that failed is not asked again."""

CAS = "kv_transfer_ssl_ca_certs"

logger = logging.getLogger(__name__)


class Ask(msgspec.Struct, tag="ask", array_like=True):
    ticket: str
    keys: list[bytes]


class Have(msgspec.Struct, tag="have", array_like=True):
    keys: list[bytes]
    arena: ArenaHandle | None
    """In which contents lie, for clients that can open it."""


class Fetch(msgspec.Struct, tag="fetch", array_like=True):
    ticket: str
    keys: list[bytes]
    by_memory: bool
    """The client has opened the arena."""


class Batch(msgspec.Struct, tag="batch", array_like=True):
    """The next of the contents; none: there are no more."""

    offsets: list[int]
    """Where they lie in the arena; empty: frames follow."""
    sizes: list[int]


class Copied(msgspec.Struct, tag="copied", array_like=True):
    """The client has copied a batch out of the arena."""


class Release(msgspec.Struct, tag="release", array_like=True):
    ticket: str


Message = Ask | Fetch | Release
_asked: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_have: msgspec.msgpack.Decoder[Have] = msgspec.msgpack.Decoder(Have)
_batch: msgspec.msgpack.Decoder[Batch] = msgspec.msgpack.Decoder(Batch)
_copied: msgspec.msgpack.Decoder[Copied] = msgspec.msgpack.Decoder(Copied)


def _credentials(settings: CacheSettings, identity: Mapping[str, str]) -> Credentials:
    told = {**identity, "kv_connector": settings.kv_connector}
    return Credentials(settings.kv_transfer_key or "", "kv_transfer_key", VERSION, told)


def _signed(key: str, name: str, address: str) -> str:
    """A ticket: a name, and the proof that a server with ``key`` at ``address`` gave it."""
    return f"{name}.{hmac.new(key.encode(), f'ticket{address}/{name}'.encode(), hashlib.sha256).hexdigest()[:32]}"


def plain_memory(size: int) -> memoryview:
    """Memory of so many bytes, whatever they are."""
    return np.empty(size, np.uint8).data


class HoldingServer:
    """Lets decode servers fetch what is held; each connection has a thread."""

    shares_memory = True
    """Whether decode servers of this machine copy contents out of the arena."""

    def __init__(self, settings: CacheSettings, held: HeldBlocks, identity: Callable[[], Mapping[str, str]]) -> None:
        """Raises ``ConfigError`` for an address that cannot be listened at, or that others can reach without TLS, and
        for a certificate that cannot be read."""
        self._held, self._settings, self._identity = held, settings, identity
        self._seconds = settings.kv_transfer_timeout
        shown, of_tls = settings.kv_transfer_address, "kv_transfer_ssl_certfile"
        self._tls = server_tls(settings.kv_transfer_ssl_certfile, settings.kv_transfer_ssl_keyfile, of_tls)
        self._socket = listen(shown, self._tls, "kv_transfer_address", of_tls, MAX_CONNECTIONS)
        if ipaddress.ip_address(self._socket.getsockname()[0]).is_unspecified:
            self._socket.close()
            raise ConfigError(f"kv_transfer_address: decode servers cannot connect to {shown}; name one address")
        host = split_address(shown)[0]
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self._is_closed = False
        self._connections = dict[Channel, bool]()
        """Whether each has logged in; in the order of their arrival."""
        threading.Thread(target=self._accept, name="kv-transfer", daemon=True).start()

    def ticket(self) -> str:
        """The name of another prompt to hold."""
        return _signed(self._settings.kv_transfer_key or "", os.urandom(16).hex(), self.address)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in [*self._connections]:
            channel.shut()
        self._held.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("no connection for KV blocks can be accepted for a moment: %s", named(error))
                time.sleep(ACCEPT_SECONDS)
                continue
            try:
                channel = accepted(sock, self._tls)
            except OSError:  # it was closed again, which a stranger can do often: no other waits
                sock.close()
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                logger.warning("there are %d connections for KV blocks, of which one is closed", MAX_CONNECTIONS)
                first = next((each for each, is_known in self._connections.copy().items() if not is_known), channel)
                first.shut()  # one whose peer takes longer to log in than any with the key
                self._connections.pop(first, None)
                if first is channel:
                    channel.close()
                    continue
            self._connections[channel] = False
            threading.Thread(target=self._serve, args=(channel, peer[0]), name="kv-transfer", daemon=True).start()

    def _serve(self, channel: Channel, peer: str) -> None:
        try:
            _credentials(self._settings, self._identity()).admit(channel)
            if channel in self._connections:
                self._connections[channel] = True
            while True:
                channel.wait_for(IDLE_SECONDS)
                channel.end_within(IDLE_SECONDS)
                message = channel.hear(_asked, MAX_MESSAGE_BYTES)
                channel.wait_for(self._seconds)
                channel.end_within(self._seconds)
                self._answer(channel, message)
        except (ChannelError, OSError) as error:
            logger.debug("the connection of %s for KV blocks ends: %s", peer, error)
        finally:
            channel.close()
            self._connections.pop(channel, None)

    def _answer(self, channel: Channel, message: Message) -> None:
        match message:
            case Ask(ticket=ticket, keys=keys):
                arena = self._held.arena if self.shares_memory else None
                channel.tell(Have(self._held.available(ticket, keys), None if arena is None else arena.handle))
            case Fetch(ticket=ticket, keys=keys, by_memory=by_memory):
                self._send(channel, (self._held.content(ticket, key) for key in keys), by_memory)
            case Release(ticket=ticket):
                self._held.release(ticket)

    def _send(self, channel: Channel, contents: Iterable[Slot | None], by_memory: bool) -> None:
        """Send contents, up to the first that is gone."""
        for batch in _batches(contents):
            sizes = [len(slot.view) for slot in batch]
            channel.end_within(self._seconds + sum(sizes) / LEAST_RATE)
            if by_memory and batch[0].offset >= 0:
                channel.tell(Batch([slot.offset for slot in batch], sizes))
                channel.hear(_copied, MAX_MESSAGE_BYTES)  # until then, ``batch`` keeps the slots
            else:
                channel.tell(Batch([], sizes))
                for slot in batch:
                    channel.send(slot.view)
        channel.tell(Batch([], []))


def _batches(contents: Iterable[Slot | None]) -> Iterator[list[Slot]]:
    """The contents before the first that is gone, together as far as all or none of them lie in the arena."""
    batch, size = list[Slot](), 0
    for slot in contents:
        if slot is None:
            break
        if batch and (size + len(slot.view) > BATCH_BYTES or (slot.offset < 0) != (batch[0].offset < 0)):
            yield batch
            batch, size = [], 0
        batch.append(slot)
        size += len(slot.view)
    if batch:
        yield batch


def _runs(batch: Batch, most_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Contents that follow each other in the arena too, of about ``most_bytes`` together: each call of the system waits
    for the interpreter's lock. Where they begin there, where in the batch, and how many bytes they have."""
    offset = place = size = 0
    for next_offset, next_size in zip(batch.offsets, batch.sizes, strict=True):
        if size and (next_offset != offset + size or size + next_size > most_bytes):
            yield offset, place, size
            place, size = place + size, 0
        offset = offset if size else next_offset
        size += next_size
    yield offset, place, size


class Fetcher:
    """Fetches what prefill servers hold, in threads of its own."""

    def __init__(
        self,
        settings: CacheSettings,
        identity: Callable[[], Mapping[str, str]],
        allocate: Callable[[int], memoryview] = plain_memory,
    ) -> None:
        """``allocate`` gives memory of so many bytes, which contents are written to and keep alive.

        Raises ``ConfigError`` for a file of CAs that cannot be read.
        """
        self._settings, self._identity, self._allocate = settings, identity, allocate
        self._key, self._seconds = settings.kv_transfer_key or "", settings.kv_transfer_timeout
        self._tls = client_tls(settings.kv_transfer_ssl_ca_certs, CAS)
        self._idle: defaultdict[str, list[Channel]] = defaultdict(list)
        self._is_closed = False
        self._failed: dict[str, tuple[float, str]] = {}
        """When a server failed last, and why."""
        self._shares: dict[str, bool] = {}
        """Whether a server's memory could be opened."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_FETCHERS, "kv-transfer")
        self.submit = self._threads.submit
        self._copiers = ThreadPoolExecutor(NUM_COPIERS, "kv-transfer-copier")

    def fetch(
        self, transfer: KVTransfer, keys: list[bytes], choose: Callable[[set[bytes]], list[bytes]], most_bytes: int
    ) -> Iterator[tuple[bytes, Content]]:
        """Ask the server of ``transfer`` which of ``keys`` it has, and yield those of them that ``choose`` returns,
        with their contents, of at most ``most_bytes`` each. All of it is then released there.

        Raises ``ChannelError`` where the server is gone or silent for ``kv_transfer_timeout``, refuses, or what came
        was damaged, and at once for some seconds after it failed.
        """
        address = transfer.address
        name, _, proof = transfer.ticket.partition(".")
        if not hmac.compare_digest(_signed(self._key, name, address).encode(), f"{name}.{proof}".encode()):
            raise ChannelError("the ticket is not of a server with the same key (kv_transfer_key)")
        since, why = self._failed.get(address, (-REST_SECONDS, ""))
        if time.monotonic() - since < REST_SECONDS:
            raise ChannelError(why)
        channel = None
        try:
            channel = self._take(address) or self._connect(address)
            channel.wait_for(self._seconds)
            channel.end_within(self._seconds)
            channel.tell(Ask(transfer.ticket, keys))
            have = channel.hear(_have, MAX_MESSAGE_BYTES)
            if wanted := choose(set(have.keys)):
                with opened(have.arena) as arena:
                    if have.arena is not None:
                        self._note(address, arena is not None)
                    channel.end_within(self._seconds + len(wanted) * most_bytes / LEAST_RATE)
                    channel.tell(Fetch(transfer.ticket, wanted, arena is not None))
                    contents = self._receive(channel, len(wanted), most_bytes, arena)
                    for content, key in zip(contents, wanted, strict=False):  # in this order, ``contents`` ends
                        yield key, content
            channel.tell(Release(transfer.ticket))
        except ChannelError as error:
            self._failed[address] = time.monotonic(), str(error)
            if channel is not None:
                channel.close()
            raise
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        self._failed.pop(address, None)
        with self._lock:
            if not self._is_closed:
                self._idle[address].append(channel)
                return
        channel.close()

    def _note(self, address: str, is_shared: bool) -> None:
        """Log by which way the blocks of a server come, once."""
        if self._shares.get(address) != is_shared:
            self._shares[address] = is_shared
            way = "its shared memory" if is_shared else "the connection, as its memory cannot be opened from here"
            logger.info("KV blocks of %s come through %s", address, way)

    def _receive(self, channel: Channel, count: int, most_bytes: int, arena: int | None) -> Iterator[Content]:
        """What ``_send`` sends of so many contents; ``arena`` is the file in which they may lie."""
        copied = list[memoryview]()
        while True:
            batch = channel.hear(_batch, MAX_MESSAGE_BYTES)
            yield from copied  # all of it was held until it was copied
            if not batch.sizes:
                return
            count -= len(batch.sizes)
            is_asked_for = count >= 0 and all(0 < size <= most_bytes for size in batch.sizes)
            if not is_asked_for or sum(batch.sizes) > max(BATCH_BYTES, most_bytes):
                raise ChannelError("other contents came than were asked for")
            memory = self._memory(sum(batch.sizes))
            ends = itertools.accumulate(batch.sizes)
            parts = [memory[end - size : end] for end, size in zip(ends, batch.sizes, strict=True)]
            copied = parts if batch.offsets else []
            if copied:
                if arena is None or len(batch.offsets) != len(parts):
                    raise ChannelError("contents were placed where they were not asked for")
                self._copy(arena, batch, memory)
                channel.tell(Copied())
                continue
            for part in parts:
                if channel.receive_into(part) < len(part):
                    raise ChannelError("a content came that is too short")
                yield part

    def _memory(self, size: int) -> memoryview:
        """Memory that contents are written to. Raises ``ChannelError`` where there is none."""
        try:
            return self._allocate(size)
        except (MemoryError, RuntimeError) as error:  # the latter of memory that cannot be pinned
            raise ChannelError(f"there is no memory for them here: {error}") from None

    def _copy(self, arena: int, batch: Batch, memory: memoryview) -> None:
        """Copy a batch from the arena, in several threads if it is large. Raises ``ChannelError``."""
        runs = list(_runs(batch, max(LEAST_SHARE_BYTES, len(memory) // NUM_COPIERS)))
        share = max(LEAST_SHARE_BYTES * len(runs) // len(memory), -(-len(runs) // NUM_COPIERS))

        def copy(start: int) -> None:
            for offset, place, size in runs[start : start + share]:
                read_into(memory[place : place + size], arena, offset)

        copies = list[Future[None]]()
        try:
            for start in range(0, len(runs), share):
                copies.append(self._copiers.submit(copy, start))
            for done in copies:
                done.result()
        except (OSError, RuntimeError) as error:  # the latter after ``close``
            raise ChannelError(f"its memory cannot be read: {error}") from None
        finally:
            wait(copies)  # of the others, too: the file is closed afterwards

    def close(self) -> None:
        """Fetch nothing more, and close what is idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._copiers.shutdown(wait=False)  # what they were given ends soon, and ``wait`` would never end for the rest
        with self._lock:
            self._is_closed = True
            for channel in itertools.chain(*self._idle.values()):
                channel.close()
            self._idle.clear()

    def _take(self, address: str) -> Channel | None:
        """An idle connection that is still open; those that are not, also of servers that ended, are let go."""
        with self._lock:
            for channels in self._idle.values():
                for channel in [channel for channel in channels if channel.is_stale]:
                    channels.remove(channel)
                    channel.close()
            return self._idle[address].pop() if self._idle[address] else None

    def _connect(self, address: str) -> Channel:
        return connect(address, self._tls, CAS, _credentials(self._settings, self._identity()), self._seconds)


CONNECTOR = HoldingServer, Fetcher
