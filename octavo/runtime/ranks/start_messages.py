"""What is said while the ranks of an engine start, and where its ranks are.

Between the processes of a host, through sockets that only they have; between hosts, through a ``NodeLink``.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from octavo.errors import CheckpointError, ConfigError, OctavoError
from octavo.runtime.memory_budget import Limits

KINDS = {kind.__name__: kind for kind in (ConfigError, CheckpointError)}


class RankLayout(msgspec.Struct, frozen=True):
    """The ranks of an engine, and which of them are on this host."""

    size: int
    num_stages: int = 1
    num_nodes: int = 1
    """Hosts."""
    node: int = 0

    @property
    def others(self) -> list[int]:
        """Those of this host that are processes of their own: all but rank 0."""
        count = self.size // self.num_nodes
        return [rank for rank in range(self.node * count, (self.node + 1) * count) if rank]


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank."""

    rank: int
    layout: RankLayout
    config: dict[str, Any]
    """Settings by their flat names."""
    gpus: tuple[str, ...]
    """Names of the GPUs that it sees, its own first; empty for ranks on CPUs."""
    log_level: str
    log_format: str


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its weights, or all of a host have."""

    free: int
    """Bytes of memory that are left, where fewest are."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot start."""

    kind: str
    """Name of the exception's class."""
    message: str

    @property
    def error(self) -> OctavoError:
        return KINDS.get(self.kind, OctavoError)(self.message)


class RankSettled(msgspec.Struct, frozen=True, tag=True):
    """The limits for which every rank allocates memory."""

    limits: Limits


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank executes messages, or all of a host do."""


StartMessage = StartRank | RankLoaded | RankFailed | RankSettled | RankReady
Expected = TypeVar("Expected", bound=StartMessage)
_decoder: msgspec.msgpack.Decoder[StartMessage] = msgspec.msgpack.Decoder(StartMessage)


def tell(connection: Connection, message: StartMessage) -> None:
    """Send a message of the start."""
    connection.send_bytes(msgspec.msgpack.encode(message))


def hear(connection: Connection, kind: type[Expected]) -> Expected:
    """Receive a message of the start. Raises ``EOFError``, or the error that the other end reports."""
    message = _decoder.decode(connection.recv_bytes())
    if isinstance(message, RankFailed):
        raise message.error
    assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
    return message
