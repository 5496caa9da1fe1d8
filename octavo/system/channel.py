"""Connections of processes that were given one key: frames over TCP whose checksums nobody without it can make.

Frames are four bytes of length (unsigned, little endian), the payload and a checksum. The two ends first show that they
have one key, which is not sent, and that their identities, what each says of itself, are equal::

    server                                client
    Hello(nonce)            ------>
                            <------       Login(nonce, identity, proof)
    Welcome(proof), or LoginRefusal(reason)

A proof is HMAC-SHA256 of both nonces and the identity. From then on the checksum of a frame is HMAC-SHA256 with a key
made of these, over the frame's number and the payload: one that was changed, left out or repeated ends the connection.
With a certificate, TLS is around all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from octavo.errors import CANCELLATIONS, ConfigError, OctavoError
from octavo.system.addresses import is_loopback, split_address

HEADER = struct.Struct("<I")
SUM_BYTES = 16
NONCE_BYTES = 32
MAX_LOGIN_BYTES = 64 << 10
LOGIN_SECONDS = 5.0
"""Time limit of the whole login, so that peers without the key cannot hold connections."""

Heard = TypeVar("Heard")


class ChannelError(OctavoError):
    """A peer is gone or silent, refuses, or sent what it should not have."""


class RefusedError(ChannelError):
    """A peer is there and does not want to have anything to do with this process."""


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


class LoginRefusal(msgspec.Struct, tag="refusal", array_like=True):
    reason: str


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Hello | Login | Welcome | LoginRefusal] = msgspec.msgpack.Decoder(
    Hello | Login | Welcome | LoginRefusal
)


class Channel:
    """One end of a connection. All methods raise ``ChannelError``."""

    def __init__(self, sock: socket.socket, is_server: bool) -> None:
        self._socket, self._is_server = sock, is_server
        self._session = b""
        self._numbers = [0, 0]
        """Of the next frame sent, and received."""
        self._seconds: float | None = sock.gettimeout()
        """For which a peer may be silent."""
        self._end = math.inf
        """When what is under way must be over, by the monotonic clock."""

    def end_within(self, seconds: float) -> None:
        """All that is sent and received from now on takes no longer together, until this or ``secure`` is called: a
        peer that sends a byte now and then is never silent."""
        self._end = time.monotonic() + seconds

    def secure(self, session: bytes) -> None:
        """From now on, frames have checksums made with the key ``session``."""
        self._session, self._end = session, math.inf

    def send(self, payload: bytes | memoryview) -> None:
        """Send a frame; waits while the peer does not read, but no longer than the socket's timeout."""
        self._send_all(HEADER.pack(len(payload)))
        self._send_all(payload)
        self._send_all(self._sum(payload, 0))

    def receive(self, most: int) -> bytes:
        """The payload of the next frame, of at most ``most`` bytes."""
        size = self._size(most)
        frame = self._receive_all(size + SUM_BYTES)
        self._check(frame[:size], frame[size:])
        return frame[:size]

    def receive_into(self, memory: memoryview) -> int:
        """Write the payload of the next frame to the beginning of ``memory``; returns how many bytes it has."""
        size = self._size(len(memory))
        self._receive_to(memory[:size])
        self._check(memory[:size], self._receive_all(SUM_BYTES))
        return size

    def tell(self, message: msgspec.Struct) -> None:
        payload = _encoder.encode(message)
        self._send_all(HEADER.pack(len(payload)) + payload + self._sum(payload, 0))

    def hear(self, decoder: msgspec.msgpack.Decoder[Heard], most: int) -> Heard:
        """The message in the next frame, of at most ``most`` bytes."""
        try:
            return decoder.decode(self.receive(most))
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
        self._seconds = seconds

    def shut(self) -> None:
        """End the connection while another thread uses it, which then finds out and closes it: the next connection must
        not have its descriptor before that."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self.shut()
        self._socket.close()

    def _size(self, most: int) -> int:
        """Of the next frame's payload, which comes behind it."""
        (size,) = HEADER.unpack(self._receive_all(HEADER.size))
        if size > most:
            raise ChannelError(f"a frame of {size} bytes came, where {most} are allowed")
        return int(size)

    def _check(self, payload: bytes | memoryview, checksum: bytes) -> None:
        if not hmac.compare_digest(checksum, self._sum(payload, 1)):
            raise ChannelError("a frame was damaged: its checksum is wrong")

    def _sum(self, payload: bytes | memoryview, direction: int) -> bytes:
        number = self._numbers[direction]
        self._numbers[direction] += 1
        by_server = self._is_server != bool(direction)
        checksum = hmac.new(self._session, struct.pack("<Q?", number, by_server), hashlib.sha256)
        checksum.update(payload)
        return checksum.digest()[:SUM_BYTES]

    def _send_all(self, data: bytes | memoryview) -> None:
        view, done = memoryview(data), 0
        try:
            while done < len(view):  # not ``sendall``, whose timeout is for all of the data
                self._set_timeout()
                done += self._socket.send(view[done:])
        except OSError as error:
            raise ChannelError(f"the peer does not read: {named(error)}") from None

    def _set_timeout(self) -> None:
        """Raises ``TimeoutError`` where it is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it is too slow")
        self._socket.settimeout(left if self._seconds is None else min(left, self._seconds))

    def _receive_all(self, size: int) -> bytes:
        data = bytearray(size)
        self._receive_to(memoryview(data))
        return bytes(data)

    def _receive_to(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                self._set_timeout()
                count = self._socket.recv_into(view[done:])
            except OSError as error:
                raise ChannelError(f"the peer does not answer: {named(error)}") from None
            if not count:
                raise ChannelError("the peer closed the connection")
            done += count


class Credentials(NamedTuple):
    """What both ends of a connection must have."""

    key: str
    name: str
    """The setting of the key, for messages."""
    version: int
    """Of the messages that follow the login."""
    identity: Mapping[str, str]

    def admit(self, channel: Channel) -> None:
        """Let a client log in, within ``LOGIN_SECONDS``. Raises ``ChannelError``, and tells the client why."""
        channel.end_within(LOGIN_SECONDS)
        nonce, own = os.urandom(NONCE_BYTES), self.identity
        channel.tell(Hello(self.version, nonce))
        login = channel.hear(_decoder, MAX_LOGIN_BYTES)
        if not isinstance(login, Login) or login.version != self.version:
            channel.tell(LoginRefusal(f"the versions of the channel differ: this server has {self.version}"))
            raise ChannelError("no login of this version came")
        proof, expected, session = _secrets(self.key, nonce + login.nonce, login.identity)
        if not hmac.compare_digest(expected, login.proof):
            channel.tell(LoginRefusal(f"the keys differ ({self.name})"))
            raise ChannelError("its key is wrong")
        if differing := sorted(name for name in {*own, *login.identity} if own.get(name) != login.identity.get(name)):
            channel.tell(LoginRefusal(f"the fingerprints differ, in {', '.join(differing)}"))
            raise ChannelError(f"its fingerprint is another, in {', '.join(differing)}")
        channel.tell(Welcome(proof))
        channel.secure(session)

    def log_in(self, channel: Channel) -> None:
        """Log in to a server. Raises ``ChannelError``."""
        channel.end_within(LOGIN_SECONDS)
        hello, nonce, identity = channel.hear(_decoder, MAX_LOGIN_BYTES), os.urandom(NONCE_BYTES), dict(self.identity)
        if not isinstance(hello, Hello):
            raise ChannelError("it speaks another protocol")
        expected, proof, session = _secrets(self.key, hello.nonce + nonce, identity)
        channel.tell(Login(self.version, nonce, identity, proof))
        answer = channel.hear(_decoder, MAX_LOGIN_BYTES)
        if isinstance(answer, LoginRefusal):
            raise RefusedError(f"it refuses: {answer.reason}")
        if not isinstance(answer, Welcome) or not hmac.compare_digest(answer.proof, expected):
            raise ChannelError(f"it does not have the same key ({self.name})")
        channel.secure(session)


def server_tls(certfile: str | None, keyfile: str | None, name: str) -> ssl.SSLContext | None:
    """That of a server with this certificate, if there is one. Raises ``ConfigError``, which names its setting."""
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    return context


def client_tls(ca_certs: str | None, name: str) -> ssl.SSLContext | None:
    """That of a client which trusts these CAs, if there are any. Raises ``ConfigError``, which names their setting."""
    if ca_certs is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    context.check_hostname = False  # the key says who is there
    return context


def listen(address: str, tls: ssl.SSLContext | None, name: str, of_tls: str, backlog: int) -> socket.socket:
    """A socket that listens at ``HOST:PORT``; ``name`` and ``of_tls`` are the settings of the address and of TLS.

    Raises ``ConfigError`` for an address at which nothing can listen, and for one that others can reach without TLS.
    """
    if tls is None and not is_loopback(address):
        raise ConfigError(f"{name}: other machines may reach {address}, which needs {of_tls}")
    try:
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot listen at {address}: {error}") from None


def accepted(sock: socket.socket, tls: ssl.SSLContext | None) -> Channel:
    """The channel of a connection that a server has accepted; the handshake of TLS, and the login, are next. Raises
    ``OSError``."""
    sock.settimeout(LOGIN_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(
        sock if tls is None else tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), is_server=True
    )


def connect(address: str, tls: ssl.SSLContext | None, of_tls: str, credentials: Credentials, seconds: float) -> Channel:
    """A channel to a server at ``HOST:PORT``, logged in; nothing may take longer than ``seconds``. ``of_tls``: the
    setting of the CAs. Raises ``ChannelError``."""
    try:
        host, port = split_address(address)
        if tls is None and not is_loopback(address):
            raise ChannelError(f"an address of another machine needs TLS ({of_tls})")
        sock = socket.create_connection((host, port), seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(sock if tls is None else tls.wrap_socket(sock, server_hostname=host), is_server=False)
    except (OSError, ValueError) as error:
        raise ChannelError(f"no connection: {error}") from None
    try:
        credentials.log_in(channel)
    except CANCELLATIONS:
        raise
    except BaseException:
        channel.close()
        raise
    return channel


def named(error: OSError) -> str:
    """What an error says, if anything."""
    return str(error) or type(error).__name__


def _secrets(key: str, nonces: bytes, identity: Mapping[str, str]) -> tuple[bytes, bytes, bytes]:
    """The proofs of server and client, and the key of checksums."""
    said = nonces + _encoder.encode(dict(identity))
    proofs = [hmac.new(key.encode(), name + said, hashlib.sha256).digest() for name in (b"server", b"client", b"sums")]
    return proofs[0], proofs[1], proofs[2]
