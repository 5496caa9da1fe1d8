"""Blocks from one server's prefix cache to another's, over TCP: what a prefill server holds, a decode server fetches.

Frames are four bytes of length (unsigned, little endian), the payload and a checksum. The two ends first show that they
have one key, which is not sent, and that their keys and values mean the same::

    server                                client
    Hello(nonce)            ------>
                            <------       Login(nonce, identity, proof)
    Welcome(proof), or Refusal(reason)
                            <------       Ask(ticket, keys)
    Have(keys)              ------>
                            <------       Fetch(ticket, keys)
    a frame of each content, up to the first that is gone, in place of which there is an empty frame
                            <------       Release(ticket)

A proof is HMAC-SHA256 of both nonces and the identity. From then on the checksum of a frame is HMAC-SHA256 with a key
made of these, over the frame's number and the payload: one that was changed, left out or repeated ends the connection.
With a certificate, TLS is around all of it. A connection serves one request after another.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from octavo.cache.held_blocks import HeldBlocks
from octavo.config import CacheSettings
from octavo.errors import CANCELLATIONS, ConfigError, OctavoError
from octavo.system.addresses import is_loopback, split_address
from octavo.types import KVTransfer

VERSION = 1
HEADER = struct.Struct("<I")
SUM_BYTES = 16
NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 8 << 20
"""Of a message, about 200,000 keys; contents have their own size."""
MAX_LOGIN_BYTES = 64 << 10
LOGIN_SECONDS = 5.0
"""Time limit of the whole login, so that peers without the key cannot hold connections."""
ACCEPT_SECONDS = 0.1
"""Pause after a connection could not be accepted, such as for want of file descriptors."""
IDLE_SECONDS = 60.0
"""After which a server closes a connection that asks for nothing."""
MAX_CONNECTIONS = 128
NUM_FETCHERS = 8
"""Prompts that are fetched at once."""
REST_SECONDS = 5.0
"""For which a server that failed is not asked again."""

logger = logging.getLogger(__name__)


class ChannelError(OctavoError):
    """A peer is gone or silent, refuses, or sent what it should not have."""


class Hello(msgspec.Struct, tag="hello", array_like=True):
    version: int
    nonce: bytes


class Login(msgspec.Struct, tag="login", array_like=True):
    version: int
    nonce: bytes
    identity: dict[str, str]
    proof: bytes


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    proof: bytes


class Refusal(msgspec.Struct, tag="refusal", array_like=True):
    reason: str


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


Message = Hello | Login | Welcome | Refusal | Ask | Have | Fetch | Release
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of a connection. All methods raise ``ChannelError``."""

    def __init__(self, sock: socket.socket, is_server: bool) -> None:
        self._socket, self._is_server = sock, is_server
        self._session = b""
        self._numbers = [0, 0]
        """Of the next frame sent, and received."""
        self._end = math.inf
        """When the login must be over, by the monotonic clock."""

    def end_login_within(self, seconds: float) -> None:
        """What is received until ``secure`` takes no longer together."""
        self._end = time.monotonic() + seconds

    def secure(self, session: bytes) -> None:
        """From now on, frames have checksums made with the key ``session``."""
        self._session, self._end = session, math.inf

    def send(self, payload: bytes) -> None:
        """Send a frame; waits while the peer does not read, but no longer than the socket's timeout."""
        self._send_all(HEADER.pack(len(payload)))
        self._send_all(payload)
        self._send_all(self._sum(payload, 0))

    def receive(self, most: int) -> bytes:
        """The payload of the next frame, of at most ``most`` bytes."""
        (size,) = HEADER.unpack(self._receive_all(HEADER.size))
        if size > most:
            raise ChannelError(f"a frame of {size} bytes came, where {most} are allowed")
        payload = self._receive_all(size)
        if not hmac.compare_digest(self._receive_all(SUM_BYTES), self._sum(payload, 1)):
            raise ChannelError("a frame was damaged: its checksum is wrong")
        return payload

    def tell(self, message: Message) -> None:
        self.send(_encoder.encode(message))

    def hear(self, most: int = MAX_MESSAGE_BYTES) -> Message:
        try:
            message: Message = _decoder.decode(self.receive(most))
            return message
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ChannelError(f"what came is not a message: {error}") from None

    @property
    def is_stale(self) -> bool:
        """Whether an idle connection was closed, or spoke unasked."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1)
            return True
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True

    def wait_for(self, seconds: float) -> None:
        """Wait no longer than ``seconds`` for each part of a frame."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()

    def _sum(self, payload: bytes, direction: int) -> bytes:
        number = self._numbers[direction]
        self._numbers[direction] += 1
        by_server = self._is_server != bool(direction)
        checksum = hmac.new(self._session, struct.pack("<Q?", number, by_server), hashlib.sha256)
        checksum.update(payload)
        return checksum.digest()[:SUM_BYTES]

    def _send_all(self, data: bytes) -> None:
        view, done = memoryview(data), 0
        try:
            while done < len(view):  # not ``sendall``, whose timeout is for all of the data
                done += self._socket.send(view[done:])
        except OSError as error:
            raise ChannelError(f"the peer does not read: {_named(error)}") from None

    def _receive_all(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                if self._end < math.inf:
                    self._socket.settimeout(max(0.001, self._end - time.monotonic()))
                count = self._socket.recv_into(view[done:])
            except OSError as error:
                raise ChannelError(f"the peer does not answer: {_named(error)}") from None
            if not count:
                raise ChannelError("the peer closed the connection")
            done += count
        return bytes(data)


def _named(error: OSError) -> str:
    return str(error) or type(error).__name__


def _secrets(key: str, nonces: bytes, identity: Mapping[str, str]) -> tuple[bytes, bytes, bytes]:
    """The proofs of server and client, and the key of checksums."""
    said = nonces + _encoder.encode(dict(identity))
    proofs = [hmac.new(key.encode(), name + said, hashlib.sha256).digest() for name in (b"server", b"client", b"sums")]
    return proofs[0], proofs[1], proofs[2]


def _signed(key: str, name: str, address: str) -> str:
    """A ticket: a name, and the proof that a server with ``key`` at ``address`` gave it."""
    return f"{name}.{hmac.new(key.encode(), f'ticket{address}/{name}'.encode(), hashlib.sha256).hexdigest()[:32]}"


class HoldingServer:
    """Lets decode servers fetch what is held; each connection has a thread."""

    def __init__(self, settings: CacheSettings, held: HeldBlocks, identity: Callable[[], Mapping[str, str]]) -> None:
        """Raises ``ConfigError`` for an address that cannot be listened at, or that others can reach without TLS, and
        for a certificate that cannot be read."""
        self._held, self._key, self._identity = held, settings.kv_transfer_key or "", identity
        self._seconds = settings.kv_transfer_timeout
        self._tls, shown = _tls_of_server(settings), settings.kv_transfer_address
        if self._tls is None and not is_loopback(shown):
            message = f"kv_transfer_address: other machines may reach {shown}, which needs kv_transfer_ssl_certfile"
            raise ConfigError(message)
        try:
            host, port = split_address(shown)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except (OSError, ValueError) as error:
            raise ConfigError(f"kv_transfer_address: cannot listen at {shown}: {error}") from None
        if ipaddress.ip_address(self._socket.getsockname()[0]).is_unspecified:
            self._socket.close()
            raise ConfigError(f"kv_transfer_address: decode servers cannot connect to {shown}; name one address")
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self._is_closed = False
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kv-transfer", daemon=True).start()

    def ticket(self) -> str:
        """The name of another prompt to hold."""
        return _signed(self._key, os.urandom(16).hex(), self.address)

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
                logger.warning("no connection for KV blocks can be accepted for a moment: %s", _named(error))
                time.sleep(ACCEPT_SECONDS)
                continue
            if not self._places.acquire(blocking=False):
                logger.warning("a connection of %s for KV blocks is closed: there are %d", peer[0], MAX_CONNECTIONS)
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, peer[0]), name="kv-transfer", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.settimeout(LOGIN_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wrapped = sock if self._tls is None else self._tls.wrap_socket(sock, server_side=True)
            with contextlib.closing(Channel(wrapped, is_server=True)) as channel:
                channel.end_login_within(LOGIN_SECONDS)
                self._admit(channel)
                while True:
                    channel.wait_for(IDLE_SECONDS)
                    message = channel.hear()
                    channel.wait_for(self._seconds)
                    self._answer(channel, message)
        except (ChannelError, OSError) as error:
            logger.debug("the connection of %s for KV blocks ends: %s", peer, error)
        finally:
            sock.close()
            self._places.release()

    def _admit(self, channel: Channel) -> None:
        nonce, own = os.urandom(NONCE_BYTES), self._identity()
        channel.tell(Hello(VERSION, nonce))
        login = channel.hear(MAX_LOGIN_BYTES)
        if not isinstance(login, Login) or login.version != VERSION:
            channel.tell(Refusal(f"the versions of the channel differ: this server has {VERSION}"))
            raise ChannelError("no login of this version came")
        proof, expected, session = _secrets(self._key, nonce + login.nonce, login.identity)
        if not hmac.compare_digest(expected, login.proof):
            channel.tell(Refusal("the keys differ (kv_transfer_key)"))
            raise ChannelError("its key is wrong")
        if differing := sorted(name for name in {*own, *login.identity} if own.get(name) != login.identity.get(name)):
            channel.tell(Refusal(f"the fingerprints differ, in {', '.join(differing)}"))
            raise ChannelError(f"its fingerprint is another, in {', '.join(differing)}")
        channel.tell(Welcome(proof))
        channel.secure(session)

    def _answer(self, channel: Channel, message: Message) -> None:
        match message:
            case Ask(ticket=ticket, keys=keys):
                channel.tell(Have(self._held.available(ticket, keys)))
            case Fetch(ticket=ticket, keys=keys):
                for key in keys:
                    content = self._held.content(ticket, key)
                    channel.send(content or b"")
                    if content is None:
                        break
            case Release(ticket=ticket):
                self._held.release(ticket)
            case _:
                raise ChannelError(f"a {type(message).__name__} came after the login")


class Fetcher:
    """Fetches what prefill servers hold, in threads of its own."""

    def __init__(self, settings: CacheSettings, identity: Callable[[], Mapping[str, str]]) -> None:
        """Raises ``ConfigError`` for a file of CAs that cannot be read."""
        self._key, self._identity = settings.kv_transfer_key or "", identity
        self._seconds = settings.kv_transfer_timeout
        self._tls = _tls_of_client(settings)
        self._idle: defaultdict[str, list[Channel]] = defaultdict(list)
        self._failed: dict[str, tuple[float, str]] = {}
        """When a server failed last, and why."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_FETCHERS, "kv-transfer")
        self.submit = self._threads.submit

    def fetch(
        self, transfer: KVTransfer, keys: list[bytes], choose: Callable[[set[bytes]], list[bytes]], most_bytes: int
    ) -> Iterator[tuple[bytes, bytes]]:
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
            have = channel.hear()
            if not isinstance(have, Have):
                raise ChannelError(f"a {type(have).__name__} came instead of the keys that it has")
            if wanted := choose(set(have.keys)):
                channel.tell(Fetch(transfer.ticket, wanted))
            for key in wanted:
                if not (content := channel.receive(most_bytes)):
                    break  # it is gone since; what comes after it is not sent
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
            self._idle[address].append(channel)

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
        try:
            host, port = split_address(address)
            if self._tls is None and not is_loopback(address):
                raise ChannelError("an address of another machine needs TLS (kv_transfer_ssl_ca_certs)")
            sock = socket.create_connection((host, port), self._seconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wrapped = sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=host)
            channel = Channel(wrapped, is_server=False)
        except (OSError, ValueError) as error:
            raise ChannelError(f"no connection: {error}") from None
        try:
            self._log_in(channel)
        except CANCELLATIONS:
            raise
        except BaseException:
            channel.close()
            raise
        return channel

    def _log_in(self, channel: Channel) -> None:
        hello, nonce, identity = channel.hear(MAX_LOGIN_BYTES), os.urandom(NONCE_BYTES), self._identity()
        if not isinstance(hello, Hello):
            raise ChannelError("it speaks another protocol")
        expected, proof, session = _secrets(self._key, hello.nonce + nonce, identity)
        channel.tell(Login(VERSION, nonce, dict(identity), proof))
        answer = channel.hear(MAX_LOGIN_BYTES)
        if isinstance(answer, Refusal):
            raise ChannelError(f"it refuses: {answer.reason}")
        if not isinstance(answer, Welcome) or not hmac.compare_digest(answer.proof, expected):
            raise ChannelError("it does not have the same key (kv_transfer_key)")
        channel.secure(session)


def _tls_of_server(settings: CacheSettings) -> ssl.SSLContext | None:
    if settings.kv_transfer_ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.kv_transfer_ssl_certfile, settings.kv_transfer_ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"kv_transfer_ssl_certfile: cannot be read: {error}") from None
    return context


def _tls_of_client(settings: CacheSettings) -> ssl.SSLContext | None:
    if settings.kv_transfer_ssl_ca_certs is None:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.kv_transfer_ssl_ca_certs)
        context.check_hostname = False  # the ticket says whose address it is, and the key who is there
        return context
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"kv_transfer_ssl_ca_certs: cannot be read: {error}") from None


CONNECTOR = HoldingServer, Fetcher
