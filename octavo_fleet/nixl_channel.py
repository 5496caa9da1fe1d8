"""Contents of KV blocks by NIXL: a decode server reads them out of a prefill server's memory, over whatever UCX finds
between the two, such as RDMA, shared memory or TCP.

Login, tickets and messages are those of ``octavo.cache.kv_channel``; contents take another way. After a ``Fetch``::

    server                                client
    Placed(where)           ------>       reads it
                            <------       Taken()
    and again, up to the one that is the last

UCX neither encrypts nor knows who asks. So contents can be read by whoever can read the network, while the channel has
their digests: one that was changed is noticed. Needs the package ``nixl``, which is imported on first use.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.cache.held_blocks import HeldBlocks
from octavo.cache.kv_channel import MAX_MESSAGE_BYTES, Fetcher, HoldingServer, plain_memory
from octavo.config import CacheSettings
from octavo.errors import CANCELLATIONS, ConfigError, OctavoError, failures_as
from octavo.system.channel import Channel, ChannelError
from octavo.system.shared_arena import Slot

STAGE_BYTES = 16 << 20
"""Contents are read in pieces of about so many bytes: one of them is filled while others are read."""
POLL_SECONDS = 0.0002
KIND, UNDER_WAY = "DRAM", "PROC"

logger = logging.getLogger(__name__)

Piece = npt.NDArray[np.uint8]


class Placed(msgspec.Struct, tag="placed", array_like=True):
    """Contents, one behind the other in the memory of an agent."""

    agent: bytes
    """What an agent tells of itself."""
    address: int
    sizes: list[int]
    digests: list[bytes]
    is_last: bool


class Taken(msgspec.Struct, tag="taken", array_like=True):
    """They were read."""


_placed: msgspec.msgpack.Decoder[Placed] = msgspec.msgpack.Decoder(Placed)
_taken: msgspec.msgpack.Decoder[Taken] = msgspec.msgpack.Decoder(Taken)


class NixlAgent:
    """This process's end of NIXL, with memory that it may read into or that others may read; thread-safe."""

    def __init__(self) -> None:
        """Raises ``ConfigError``."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(f"kv_connector: nixl needs: pip install 'octavo[nixl]' ({error})") from None
        with _failures_as(ConfigError, "kv_connector: NIXL cannot be started"):
            self._agent: Any = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"]))
        self._known: dict[bytes, str] = {}
        """Names of other agents."""
        self._free: list[Piece] = []
        self._busy: list[tuple[Piece, Any]] = []
        """Pieces into which others may still be read, and what reads them."""
        self._lock = threading.Lock()

    @contextmanager
    def memory(self, size: int) -> Iterator[Piece]:
        """Registered memory of at least so many bytes. Raises ``ChannelError`` if there cannot be more."""
        with self._lock:
            self._free += [piece for piece, transfer in self._busy if self._is_over(transfer)]
            self._busy = [known for known in self._busy if not any(known[0] is piece for piece in self._free)]
            found = next((i for i, piece in enumerate(self._free) if len(piece) >= size), None)
            piece = np.empty(max(size, STAGE_BYTES), np.uint8) if found is None else self._free.pop(found)
            if found is None:
                with _failures_as(ChannelError, "NIXL cannot register memory"):
                    self._agent.register_memory([(piece.ctypes.data, len(piece), 0, "")], KIND)
        try:
            yield piece
        finally:
            with self._lock:
                if not any(piece is other for other, _ in self._busy):
                    self._free.append(piece)

    def told(self) -> bytes:
        """What another agent must know to read this one's memory. Raises ``ChannelError``."""
        with self._lock, _failures_as(ChannelError, "NIXL does not describe its memory"):
            found: bytes = self._agent.get_agent_metadata()
        return found

    def read(self, placed: Placed, size: int, target: Piece, seconds: float) -> None:
        """Read what was placed. Raises ``ChannelError``, also after ``seconds``."""
        end = time.monotonic() + seconds
        try:
            with _failures_as(ChannelError, "NIXL cannot read its memory"):
                transfer = self._prepare(placed, size, target)
                state = self._run(transfer, target, end)
        except ChannelError:
            self._known.pop(placed.agent, None)
            raise
        if state != "DONE":
            raise ChannelError(f"NIXL did not read its memory within {seconds:g} s: {state}")

    def _prepare(self, placed: Placed, size: int, target: Piece) -> Any:
        with self._lock:
            if placed.agent not in self._known:
                name = self._agent.add_remote_agent(placed.agent)
                self._known[placed.agent] = name.decode() if isinstance(name, bytes) else name
            ours = self._agent.get_xfer_descs([(target.ctypes.data, size, 0)], KIND)
            theirs = self._agent.get_xfer_descs([(placed.address, size, 0)], KIND)
            return self._agent.initialize_xfer("READ", ours, theirs, self._known[placed.agent])

    def _run(self, transfer: Any, target: Piece, end: float) -> str:
        """The state that a transfer ends in; it and ``target`` are kept unless that is known."""
        state: str = UNDER_WAY
        try:
            with self._lock:
                state = self._agent.transfer(transfer)
            while state == UNDER_WAY and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                with self._lock:
                    state = self._agent.check_xfer_state(transfer)
            return state
        finally:
            with self._lock:
                if state == UNDER_WAY:
                    self._busy.append((target, transfer))
                else:
                    self._release(transfer)

    def _is_over(self, transfer: Any) -> bool:
        """Whether nothing is read by it any more; then it is released."""
        try:
            if self._agent.check_xfer_state(transfer) == UNDER_WAY:
                return False
        except CANCELLATIONS:
            raise
        except BaseException:  # its server is gone
            pass
        self._release(transfer)
        return True

    def _release(self, transfer: Any) -> None:
        """Let go of a transfer that is over; where NIXL refuses there is nothing more to do."""
        try:
            self._agent.release_xfer_handle(transfer)
        except CANCELLATIONS:
            raise
        except BaseException as error:
            logger.warning("NIXL does not release a transfer: %s: %s", type(error).__name__, error)


def _failures_as(kind: type[OctavoError], what: str) -> AbstractContextManager[None]:
    """Raise failures of NIXL, which have classes of its own, as ``kind``."""
    return failures_as(lambda error: kind(f"{what}: {type(error).__name__}: {error}"))


class NixlServer(HoldingServer):
    """Lets decode servers read what is held."""

    shares_memory = False  # UCX finds its own way

    def __init__(self, settings: CacheSettings, held: HeldBlocks, identity: Callable[[], Mapping[str, str]]) -> None:
        """Raises ``ConfigError``, as ``HoldingServer`` does, and where NIXL is missing or does not start."""
        self._agent = NixlAgent()
        super().__init__(settings, held, identity)

    def _send(self, channel: Channel, contents: Iterable[Slot | None], by_memory: bool) -> None:
        batch, size = list[Slot](), 0
        for content in contents:
            if content is None:
                break
            if batch and size + len(content.view) > STAGE_BYTES:
                self._place(channel, batch, size, is_last=False)
                batch, size = [], 0
            batch.append(content)
            size += len(content.view)
        self._place(channel, batch, size, is_last=True)

    def _place(self, channel: Channel, batch: list[Slot], size: int, is_last: bool) -> None:
        views = [slot.view for slot in batch]
        with self._agent.memory(size) as piece:
            piece[:size] = np.frombuffer(bytearray().join(views), np.uint8)
            digests = [hashlib.sha256(view).digest() for view in views]
            channel.tell(Placed(self._agent.told(), piece.ctypes.data, [len(view) for view in views], digests, is_last))
            channel.hear(_taken, MAX_MESSAGE_BYTES)


class NixlFetcher(Fetcher):
    """Reads what prefill servers hold."""

    def __init__(
        self,
        settings: CacheSettings,
        identity: Callable[[], Mapping[str, str]],
        allocate: Callable[[int], memoryview] = plain_memory,
    ) -> None:
        """Raises ``ConfigError``, as ``Fetcher`` does, and where NIXL is missing or does not start."""
        self._agent = NixlAgent()
        super().__init__(settings, identity, allocate)

    def _receive(self, channel: Channel, count: int, most_bytes: int, arena: int | None) -> Iterator[memoryview]:
        is_last = False
        while not is_last:
            placed = channel.hear(_placed, MAX_MESSAGE_BYTES)
            is_last, size = placed.is_last, sum(placed.sizes)
            count -= len(placed.sizes)
            is_asked_for = count >= 0 and all(0 < length <= most_bytes for length in placed.sizes)
            is_bounded = size <= max(STAGE_BYTES, most_bytes)
            if not is_asked_for or not is_bounded or len(placed.digests) != len(placed.sizes):
                raise ChannelError("other contents were placed than were asked for")
            content = self._memory(size)
            if size:
                with self._agent.memory(size) as piece:
                    self._agent.read(placed, size, piece, self._seconds)
                    np.frombuffer(content, np.uint8)[:] = piece[:size]
            channel.tell(Taken())
            start = 0
            for length, digest in zip(placed.sizes, placed.digests, strict=True):
                part = content[start : start + length]
                if hashlib.sha256(part).digest() != digest:
                    raise ChannelError("a content was damaged: its digest is wrong")
                yield part
                start += length


CONNECTOR = NixlServer, NixlFetcher
