"""Blocks from one server's prefix cache to another's, over TCP: what a prefill server holds, a decode server fetches.

Messages after the login of ``octavo.system.channel``, whose identities say what keys and values mean::

    server                                client
                            <------       Ask(ticket, keys)
    Have(keys)              ------>
                            <------       Fetch(ticket, keys)
    a frame of each content, up to the first that is gone, in place of which there is an empty frame
                            <------       Release(ticket)

A connection serves one request after another.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

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
from octavo.types import KVTransfer

VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20
"""Of a message, about 200,000 keys; contents have their own size."""
ACCEPT_SECONDS = 0.1
"""Pause after a connection could not be accepted, such as for want of file descriptors."""
IDLE_SECONDS = 60.0
"""After which a server closes a connection that asks for nothing."""
MAX_CONNECTIONS = 128
NUM_FETCHERS = 8
"""Prompts that are fetched at once."""
REST_SECONDS = 5.0
"""For which a server that failed is not asked again."""

CAS = "kv_transfer_ssl_ca_certs"

logger = logging.getLogger(__name__)


class Ask(msgspec.Struct, tag="ask", array_like=True):
    ticket: str
    keys: list[bytes]


class Have(msgspec.Struct, tag="have", array_like=True):
    keys: list[bytes]


class Fetch(msgspec.Struct, tag="fetch", array_like=True):
    ticket: str
    keys: list[bytes]


class Release(msgspec.Struct, tag="release", array_like=True):
    ticket: str


Message = Ask | Have | Fetch | Release
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


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
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kv-transfer", daemon=True).start()

    def ticket(self) -> str:
        """The name of another prompt to hold."""
        return _signed(self._settings.kv_transfer_key or "", os.urandom(16).hex(), self.address)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
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
            if not self._places.acquire(blocking=False):
                logger.warning("a connection of %s for KV blocks is closed: there are %d", peer[0], MAX_CONNECTIONS)
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, peer[0]), name="kv-transfer", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with contextlib.closing(accepted(sock, self._tls)) as channel:
                _credentials(self._settings, self._identity()).admit(channel)
                while True:
                    channel.wait_for(IDLE_SECONDS)
                    message = channel.hear(_decoder, MAX_MESSAGE_BYTES)
                    channel.wait_for(self._seconds)
                    self._answer(channel, message)
        except (ChannelError, OSError) as error:
            logger.debug("the connection of %s for KV blocks ends: %s", peer, error)
        finally:
            sock.close()
            self._places.release()

    def _answer(self, channel: Channel, message: Message) -> None:
        match message:
            case Ask(ticket=ticket, keys=keys):
                channel.tell(Have(self._held.available(ticket, keys)))
            case Fetch(ticket=ticket, keys=keys):
                self._send(channel, (self._held.content(ticket, key) for key in keys))
            case Release(ticket=ticket):
                self._held.release(ticket)
            case Have():
                raise ChannelError("a Have came, which servers send")

    def _send(self, channel: Channel, contents: Iterable[bytes | None]) -> None:
        """Send contents, up to the first that is gone."""
        for content in contents:
            channel.send(content or b"")
            if content is None:
                break


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
        self._failed: dict[str, tuple[float, str]] = {}
        """When a server failed last, and why."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_FETCHERS, "kv-transfer")
        self.submit = self._threads.submit

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
            channel.tell(Ask(transfer.ticket, keys))
            have = channel.hear(_decoder, MAX_MESSAGE_BYTES)
            if not isinstance(have, Have):
                raise ChannelError(f"a {type(have).__name__} came instead of the keys that it has")
            if wanted := choose(set(have.keys)):
                channel.tell(Fetch(transfer.ticket, wanted))
                yield from zip(wanted, self._receive(channel, len(wanted), most_bytes), strict=False)
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
            self._idle[address].append(channel)

    def _receive(self, channel: Channel, count: int, most_bytes: int) -> Iterator[Content]:
        """What ``_send`` sends of so many contents."""
        for _ in range(count):
            memory = self._allocate(most_bytes)
            if not (size := channel.receive_into(memory)):
                break  # it is gone since; what comes after it is not sent
            yield memory[:size]

    def close(self) -> None:
        """Fetch nothing more, and close what is idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for channels in self._idle.values():
            for channel in channels:
                channel.close()

    def _take(self, address: str) -> Channel | None:
        """An idle connection that is still open."""
        with self._lock:
            while self._idle[address]:
                channel = self._idle[address].pop()
                if not channel.is_stale:
                    return channel
                channel.close()
        return None

    def _connect(self, address: str) -> Channel:
        return connect(address, self._tls, CAS, _credentials(self._settings, self._identity()), self._seconds)


CONNECTOR = HoldingServer, Fetcher
