"""A server takes the place of a running one: listening socket, idle connections, then the requests of the journal.

Both have the same ``--takeover-socket``, a Unix socket at which the running server, the *predecessor*, waits for its
*successor*. They exchange messages, each a byte for its kind, then its content:

- ``LISTENER`` from the predecessor at once, with the listening socket. Both share its queue of new connections.
- ``READY`` from the successor, when it accepts connections. The predecessor stops to, and completes its requests.
- ``CONNECTION`` from the predecessor, with a connection that has no request in progress.
- ``KEY`` from the successor: journal, owner and idempotency key of a request; the answer is ``YES`` or ``NO``.

The connection between them ends with the predecessor. If it ends before ``READY``, the predecessor goes on as before.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.errors import ConfigError
from octavo.system.private_files import FILE_MODE

LISTENER, READY, CONNECTION, KEY, YES, NO = b"L", b"R", b"C", b"K", b"Y", b"N"
MAX_MESSAGE_BYTES = 16384
"""Longer than a path, an owner and an idempotency key together."""
HELLO_SECONDS = 10

logger = logging.getLogger("octavo.server")

HasRequest = Callable[[str, str, str], bool]
"""Whether the journal in a folder has a request with this owner and key."""


class TakeoverChannel:
    """Messages, with a file descriptor or without, between two processes; used on the event loop."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._ended = asyncio.Event()

    def start(self, on_message: Callable[[bytes, int], None]) -> None:
        """Call ``on_message`` with each message and its descriptor, which it owns, or -1."""
        self._loop.add_reader(self._socket, self._read, on_message)

    def send(self, message: bytes, descriptor: int = -1) -> None:
        """Send a message soon. ``descriptor`` is closed once it was sent, or if the other process has ended."""
        if self.is_ended:
            _close(descriptor)
            return
        self._unsent.append((message, descriptor))
        self._write()

    async def ended(self) -> None:
        """Wait until the other process has ended, or closed its end."""
        await self._ended.wait()

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._drop_unsent()
        self._ended.set()

    def _drop_unsent(self) -> None:
        for _, descriptor in self._unsent:
            _close(descriptor)
        self._unsent.clear()

    def _read(self, on_message: Callable[[bytes, int], None]) -> None:
        while not self.is_ended:
            try:
                message, descriptor = _receive(self._socket)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The other process ended with a message unread. What it sent before can still be read, but only now:
                # the event loop watches no socket that had an error.
                continue
            except OSError:
                message, descriptor = b"", -1
            if message:
                on_message(message, descriptor)
            else:
                self.close()

    def _write(self) -> None:
        try:
            while self._unsent:
                message, descriptor = self._unsent[0]
                _send(self._socket, message, descriptor)
                self._unsent.popleft()
                _close(descriptor)
        except OSError as error:
            # Descriptors in transit are limited by the kernel (ETOOMANYREFS), as bytes are.
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                self._loop.add_writer(self._socket, self._write)
                return
            self._drop_unsent()  # the other process has ended; what it sent before can still be read
        self._loop.remove_writer(self._socket)


class Predecessor:
    """The running server, as its successor sees it."""

    def __init__(self, connection: socket.socket, listener: socket.socket) -> None:
        self.listener = listener
        """The shared listening socket."""
        self._connection = connection
        self._channel: TakeoverChannel | None = None
        self._is_started = asyncio.Event()
        self._asked: deque[asyncio.Future[bool]] = deque()

    def start(self, adopt: Callable[[socket.socket], None]) -> None:
        """Tell the predecessor to end, now that this server accepts connections; ``adopt`` is called with its own."""
        self._channel = channel = TakeoverChannel(self._connection)

        def on_message(message: bytes, descriptor: int) -> None:
            if message == CONNECTION and descriptor >= 0:
                adopt(socket.socket(fileno=descriptor))
            elif message in (YES, NO) and self._asked:
                self._asked.popleft().set_result(message == YES)

        channel.start(on_message)
        channel.send(READY)
        self._is_started.set()

    async def has_request(self, folder: Path, owner: str, key: str) -> bool:
        """Whether the predecessor has a request with this key in the journal ``folder``; true once it has ended."""
        channel = self._channel
        if channel is None or channel.is_ended:
            return True
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        channel.send(KEY + msgspec.msgpack.encode((str(folder.resolve()), owner, key)))
        ended = asyncio.ensure_future(channel.ended())
        await asyncio.wait([answer, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return not answer.done() or answer.result()

    async def ended(self) -> None:
        """Wait until the predecessor has ended, after ``start``."""
        await self._is_started.wait()
        assert self._channel is not None
        await self._channel.ended()

    def close(self) -> None:
        self._connection.close() if self._channel is None else self._channel.close()


def find_predecessor(path: Path) -> Predecessor | None:
    """The server that waits at ``path``, if there is one. Raises ``ConfigError``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(HELLO_SECONDS)
    try:
        connection.connect(str(path))
        message, descriptor = _receive(connection)
        if message != LISTENER or descriptor < 0:
            raise OSError(errno.EPROTO, "no answer from the server there")
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise ConfigError(f"takeover_socket: cannot take over at {path}: {error.strerror or error}") from None
    return Predecessor(connection, socket.socket(fileno=descriptor))


class Successor:
    """The server that takes over, as its predecessor sees it."""

    def __init__(self, channel: TakeoverChannel) -> None:
        self._channel = channel

    def take(self, connection: int) -> None:
        """Give it a connection: the descriptor of its socket, which stays open here."""
        self._channel.send(CONNECTION, os.dup(connection))

    @property
    def has_all(self) -> bool:
        """Whether it got all that was given to it."""
        return not self._channel.has_unsent


class TakeoverSocket:
    """Where a server waits for its successor, at ``path``."""

    def __init__(
        self, path: Path, listener: socket.socket, has_request: HasRequest, on_ready: Callable[[Successor], None]
    ) -> None:
        """``on_ready`` is called once, when a successor accepts connections. Raises ``OSError``."""
        self._listener = listener
        self._has_request = has_request
        self._on_ready = on_ready
        self._channels: list[TakeoverChannel] = []
        self._socket: socket.socket | None = _listen(path)
        self._path = path
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def close(self) -> None:
        """End what a successor waits for."""
        if self._socket is not None:
            self._path.unlink(missing_ok=True)
        self._stop_listening()
        for channel in self._channels:
            channel.close()

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        channel = TakeoverChannel(connection)
        self._channels = [each for each in self._channels if not each.is_ended] + [channel]

        def on_message(message: bytes, descriptor: int) -> None:
            _close(descriptor)
            if message == READY:
                self._hand_over(channel)
            elif message[:1] == KEY:
                channel.send(YES if self._find(message[1:]) else NO)

        channel.start(on_message)
        channel.send(LISTENER, os.dup(self._listener.fileno()))

    def _hand_over(self, channel: TakeoverChannel) -> None:
        if self._socket is None:  # there is a successor already
            channel.close()
            return
        self._stop_listening()
        self._on_ready(Successor(channel))

    def _find(self, content: bytes) -> bool:
        try:
            return self._has_request(*msgspec.msgpack.decode(content, type=tuple[str, str, str]))
        except msgspec.MsgspecError:
            return False

    def _stop_listening(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None


def _listen(path: Path) -> socket.socket:
    """A socket at ``path`` in place of that of an earlier server, which only this user can connect to."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(new))
        new.chmod(FILE_MODE)
        listener.listen()
        new.replace(path)
    except OSError:
        listener.close()
        new.unlink(missing_ok=True)
        raise
    listener.setblocking(False)
    return listener


def _send(connection: socket.socket, message: bytes, descriptor: int) -> None:
    if descriptor < 0:
        connection.send(message)
    else:
        socket.send_fds(connection, [message], [descriptor])


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """A message, empty at the end, and its descriptor or -1. Raises ``OSError``."""
    message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    return message, descriptors[0] if descriptors else -1


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
