"""The link between two hosts of an engine, each of which has some of the stages: what the ranks of one host exchange
through memory goes over TCP, with the login of ``octavo.system.channel``.

The first host has rank 0, and a link to each other one; between two others it passes on what stages compute. A link is
two connections, one for each direction, as TLS is not for two threads at once. What arrives is taken at once and waits
in memory for whoever reads it: otherwise what one rank does not read yet could hold up what another waits for.
Both ends send something every second; one that is silent for ``SILENT_SECONDS`` is lost, whether its host is gone or a
signal stopped it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from octavo import __version__
from octavo.config import ModelSettings
from octavo.errors import OctavoError, RanksLost
from octavo.ops.device_backend import Check, RankMemory, Way
from octavo.runtime.ranks.start_messages import RankFailed, RankLoaded, RankReady, RankSettled
from octavo.system.channel import Channel, ChannelError, Credentials, accepted, client_tls, connect, listen, server_tls

PROTOCOL = 1
ALIVE_SECONDS = 1.0
SILENT_SECONDS = 10.0
MAX_BYTES = 1 << 31
"""Of a message: more than a stage hands on of any step."""
MAX_LOGINS = 16
"""Connections that log in at the same time."""
START_LOOK_SECONDS = 0.002
"""Between two looks whether a host has come, or has loaded. They use a little processor time, by which the supervisor
sees that this process does not hang."""
REPORT_SECONDS = 30.0

logger = logging.getLogger(__name__)


class Joining(msgspec.Struct, frozen=True, tag=True):
    """The first message of a connection of a host."""

    node: int
    pair: str
    """Both connections of a link have the same."""
    is_upwards: bool
    """Whether it is for what goes to the first host."""


class StartNode(msgspec.Struct, frozen=True, tag=True):
    """The first message to a host."""

    config: dict[str, Any]
    """Settings by their flat names."""
    fingerprint: str
    """Of the checkpoint."""


class Order(msgspec.Struct, frozen=True, tag=True):
    """A message that every rank executes."""

    message: bytes
    digests: list[tuple[int, int]]
    """Digests of rank 0's results, with the number of the step up to which each is, since the last order."""


class StageOutput(msgspec.Struct, frozen=True, tag=True):
    """What a rank has computed, for a rank of another stage."""

    way: Way
    content: bytes


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """A rank of a host has ended."""

    problem: str
    status: int
    """Its return code; negative: the signal that ended it."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Nothing else was to say."""


NodeMessage = (
    StartNode | RankLoaded | RankFailed | RankSettled | RankReady | Order | StageOutput | NodeLost | Alive | Joining
)
Expected = TypeVar("Expected", bound=NodeMessage)
_decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)
OnOutput = Callable[[StageOutput], None]
OnLinkLost = Callable[[str, int], None]
"""Called in a thread when the other host is lost: why, and the status of the rank that has ended, or a signal's."""


class NodeLink:
    """One end of a link; ``node`` is the number of the other host."""

    def __init__(self, node: int, out: Channel, into: Channel) -> None:
        self.node = node
        self.on_output: OnOutput = lambda output: None
        self.on_lost: OnLinkLost = lambda problem, status: None
        self._out, self._into = out, into
        self._sending = threading.Lock()
        self._heard: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        """What is not a stage's output; at last ``None``."""
        self._problem = ""
        self.failure: OctavoError | None = None
        """Why the other host could not start, if it said so."""
        self._is_closed, self._has_received = threading.Event(), threading.Event()
        out.wait_for(SILENT_SECONDS)
        into.wait_for(SILENT_SECONDS)
        for work in (self._receive, self._stay_alive):
            threading.Thread(target=work, name=f"octavo-node-{node}", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        return self._is_closed.is_set()

    def tell(self, message: NodeMessage) -> None:
        """Send a message. Raises ``RanksLost``, or the error that the other end has reported."""
        try:
            with self._sending:
                self._out.tell(message)
        except ChannelError as error:
            self._has_received.wait(ALIVE_SECONDS)  # the other end may have said why it closes
            self._lose(str(error), -signal.SIGKILL)
            raise self.failure or RanksLost(f"host {self.node}: {self._problem or error}") from None

    def hear(self, kind: type[Expected], look_seconds: float | None = None, check: Check = lambda: None) -> Expected:
        """Wait for the next message that is no stage's output, by default asleep until it comes, else looking so often,
        with ``check``, which may raise. Raises ``RanksLost``, or the error that the other end reports."""
        message = self._next(look_seconds, check)
        if message is None:
            self._heard.put(None)
            raise self.failure or RanksLost(f"host {self.node}: {self._problem or 'the link is closed'}")
        if not isinstance(message, kind):
            raise RanksLost(f"host {self.node}: a {type(message).__name__} came, not a {kind.__name__}")
        return message

    def _next(self, look_seconds: float | None, check: Check) -> NodeMessage | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._heard.get(timeout=look_seconds)
            check()

    def close(self) -> None:
        """End the connections, and the threads."""
        self._is_closed.set()
        self._heard.put(None)
        self._out.close()
        self._into.close()

    def _receive(self) -> None:
        try:
            while True:
                match message := self._into.hear(_decoder, MAX_BYTES):
                    case Alive():
                        pass
                    case StageOutput():
                        self.on_output(message)
                    case NodeLost(problem, status):
                        self._lose(problem, status)
                    case RankFailed(kind, problem):  # the link ends then, and for this reason
                        self._problem = problem
                        self.failure = RankFailed(kind, f"host {self.node}: {problem}").error
                        self._heard.put(None)
                    case _:
                        self._heard.put(message)
        except (ChannelError, OctavoError) as error:
            self._lose(str(error), -signal.SIGKILL)
        finally:
            self._has_received.set()

    def _stay_alive(self) -> None:
        with contextlib.suppress(OctavoError):
            while not self._is_closed.wait(ALIVE_SECONDS):
                self.tell(Alive())

    def _lose(self, problem: str, status: int) -> None:
        if self._is_closed.is_set():
            return
        self._problem = self._problem or problem
        self.close()
        self.on_lost(f"host {self.node}: {self._problem}", status)


class StageRelay:
    """Takes what stages hand on from the memory of this host to links, and from links to the memory."""

    def __init__(self, memory: RankMemory, node: int, links: Mapping[int, NodeLink], check: Check) -> None:
        """``links`` to each other host; ``check`` raises when this engine has ended."""
        self._memory, self._links, self._check = memory, links, check
        self._arrived: dict[Way, queue.SimpleQueue[bytes]] = {}
        for way in memory.crossing:
            source, target = map(memory.node_of, way)
            if target == node:
                self._arrived[way] = queue.SimpleQueue()
            if node in (source, target):
                work = self._write if target == node else self._send
                threading.Thread(target=work, args=(way,), name="octavo-stages", daemon=True).start()
        for link in links.values():
            link.on_output = self.take

    def take(self, output: StageOutput) -> None:
        """Take what has arrived. Raises ``RanksLost``."""
        if (arrived := self._arrived.get(output.way)) is not None:
            arrived.put(output.content)
        else:
            self._links[self._memory.node_of(output.way[1])].tell(output)

    def _send(self, way: Way) -> None:
        reader, link = self._memory.reader_of(way, self._check), self._links[self._memory.node_of(way[1])]
        with contextlib.suppress(OctavoError):
            while True:
                link.tell(StageOutput(way, reader.next()))

    def _write(self, way: Way) -> None:
        writer, arrived = self._memory.writer_of(way, self._check), self._arrived[way]
        with contextlib.suppress(OctavoError):
            while True:
                with contextlib.suppress(queue.Empty):
                    writer.write(arrived.get(timeout=ALIVE_SECONDS))
                self._check()


# ---- how a link comes about


def _address(settings: ModelSettings) -> str:
    host = settings.master_addr
    return f"{f'[{host}]' if ':' in host else host}:{settings.master_port}"


def _credentials(settings: ModelSettings) -> Credentials:
    identity = {"octavo": __version__, "nnodes": str(settings.nnodes)}
    return Credentials(settings.node_key or "", "node_key", PROTOCOL, identity)


def join(settings: ModelSettings) -> NodeLink:
    """The link of this host to the first one. Raises ``ChannelError``, and ``ConfigError`` if the file of CAs cannot be
    read."""
    of_tls = "node_ssl_ca_certs"
    tls, pair, channels = client_tls(settings.node_ssl_ca_certs, of_tls), os.urandom(16).hex(), list[Channel]()
    try:
        for is_upwards in (True, False):
            channels.append(connect(_address(settings), tls, of_tls, _credentials(settings), SILENT_SECONDS))
            channels[-1].tell(Joining(settings.node_rank, pair, is_upwards))
    except ChannelError:
        for channel in channels:
            channel.close()
        raise
    return NodeLink(0, *channels)


class NodeListener:
    """Where the other hosts come to the first."""

    def __init__(self, settings: ModelSettings) -> None:
        """Raises ``ConfigError`` for an address that cannot be listened at, or that others can reach without TLS, and
        for a certificate that cannot be read."""
        of_tls = "node_ssl_certfile"
        self._settings = settings
        self._tls = server_tls(settings.node_ssl_certfile, settings.node_ssl_keyfile, of_tls)
        self._socket = listen(_address(settings), self._tls, "master_addr", of_tls, MAX_LOGINS)
        self._socket.settimeout(START_LOOK_SECONDS)
        self._joined: queue.SimpleQueue[tuple[Joining, Channel]] = queue.SimpleQueue()
        self._logins = threading.Semaphore(MAX_LOGINS)

    def wait(self, check: Check = lambda: None) -> list[NodeLink]:
        """Wait until all hosts are there, with ``check``, which may raise; the links to them, in their order."""
        half: dict[str, tuple[Joining, Channel]] = {}
        links: dict[int, NodeLink] = {}
        reported = 0.0
        with self._socket:
            while missing := [node for node in range(1, self._settings.nnodes) if self._is_missing(node, links)]:
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    logger.info("waiting at %s for the hosts with node_rank %s", _address(self._settings), missing)
                check()
                self._accept()
                while not self._joined.empty():
                    joining, channel = self._joined.get()
                    if (other := half.pop(joining.pair, None)) is None:
                        half[joining.pair] = joining, channel
                        continue
                    into, out = (channel, other[1]) if joining.is_upwards else (other[1], channel)
                    if (known := links.get(joining.node)) is not None:
                        known.close()
                    links[joining.node] = NodeLink(joining.node, out, into)
        for _, channel in half.values():
            channel.close()
        return [links[node] for node in sorted(links)]

    def _is_missing(self, node: int, links: Mapping[int, NodeLink]) -> bool:
        return node not in links or links[node].is_lost

    def _accept(self) -> None:
        try:
            sock, peer = self._socket.accept()
        except OSError:
            return
        if not self._logins.acquire(blocking=False):
            sock.close()
            return
        threading.Thread(target=self._admit, args=(sock, peer[0]), name="octavo-nodes", daemon=True).start()

    def _admit(self, sock: socket.socket, peer: str) -> None:
        try:
            channel = accepted(sock, self._tls)
            _credentials(self._settings).admit(channel)
            joining = channel.hear(_decoder, MAX_BYTES)
            if not isinstance(joining, Joining) or not 0 < joining.node < self._settings.nnodes:
                raise ChannelError(f"it is no host of nnodes {self._settings.nnodes}")
            self._joined.put((joining, channel))
        except (ChannelError, OSError, ssl.SSLError) as error:
            logger.warning("a connection of %s to master_addr is refused: %s", peer, error)
            sock.close()
        finally:
            self._logins.release()
