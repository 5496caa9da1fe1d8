"""What a prefill server keeps for decode servers: the contents of the blocks of prompts, until they were fetched.

A *ticket* names one prompt. Prompts share the contents of equal blocks. A content goes when no ticket has it any more:
each ticket is released by the server that has fetched it, and at the latest when its time is over. Where there is such
memory, contents lie where decode servers of the same machine can read them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from octavo.cache.offload_tiers import Content
from octavo.errors import OctavoError
from octavo.system.shared_arena import SharedArena, Slot

READ_SECONDS = 30.0
"""Most that a copy out of a device may take."""
NUM_READERS = 3
"""Threads that copy contents out of the memory that a device copies to: one alone is slower than a device."""

logger = logging.getLogger(__name__)


class BlockToHold(NamedTuple):
    """A content, how many bytes it has, and what starts to read it."""

    key: bytes
    size: int
    read: Callable[[], Callable[[], Content]]
    """See ``BlockStore.read``."""


class _Held:
    """A content, which may still be on its way from the device, and the tickets that have it."""

    __slots__ = ("content", "num_tickets", "size")

    def __init__(self, content: Future[Slot | None], size: int) -> None:
        self.content, self.size = content, size
        self.num_tickets = 0


class HeldBlocks:
    """At most ``capacity`` bytes of contents, each ticket for ``seconds``; thread-safe."""

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self.num_expired = 0
        """Tickets that were not released before their time was over."""
        self._seconds = seconds
        self._clock = clock
        self._held: dict[bytes, _Held] = {}
        self._tickets: OrderedDict[str, tuple[float, set[bytes]]] = OrderedDict()
        """Deadline and keys, in the order of the deadlines."""
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-transfer-reader")
        self.arena: SharedArena | None = None
        """In which contents lie, as far as there is room; ``None`` where there is no such memory."""
        try:
            self.arena = SharedArena(capacity)
        except OSError as error:
            logger.info("KV blocks are sent to decode servers, also to those of this machine: %s", error)

    def __len__(self) -> int:
        """Contents that are held now."""
        with self._lock:
            self._expire()
            return len(self._held)

    def hold(self, ticket: str, blocks: Iterable[BlockToHold]) -> int:
        """Keep the first of ``blocks``, as many as there is room for; returns their number.

        To be called by the engine's thread, before the blocks are released.
        """
        keys = set[bytes]()
        with self._lock:
            self._expire()
            self._tickets[ticket] = self._clock() + self._seconds, keys  # also where ``read`` fails
            for key, size, read in blocks:
                held = self._held.get(key)
                if held is None:
                    if self.num_bytes + size > self.capacity:
                        break
                    held = self._held[key] = _Held(self._readers.submit(self._copied, read(), size), size)
                    self.num_bytes += size
                held.num_tickets += 1
                keys.add(key)
        return len(keys)

    def available(self, ticket: str, keys: Iterable[bytes]) -> list[bytes]:
        """Those of ``keys`` that ``ticket`` has."""
        with self._lock:
            self._expire()
            _, own = self._tickets.get(ticket, (0.0, set[bytes]()))
        return [key for key in keys if key in own]

    def content(self, ticket: str, key: bytes) -> Slot | None:
        """The content of a key that ``ticket`` has; ``None`` if it has not, or not any more."""
        with self._lock:
            entry = self._tickets.get(ticket)
            held = self._held[key] if entry is not None and key in entry[1] else None
        try:
            return None if held is None else held.content.result(READ_SECONDS)
        except (TimeoutError, CancelledError):  # the device is slow, or the engine ends
            return None

    def release(self, ticket: str) -> None:
        """``ticket`` is not needed any more; does nothing if there is none of this name."""
        with self._lock:
            if (entry := self._tickets.pop(ticket, None)) is not None:
                self._drop(entry[1])

    def close(self) -> None:
        """Forget everything."""
        self._readers.shutdown(cancel_futures=True)
        with self._lock:
            self._tickets.clear()
            self._held.clear()
            self.num_bytes = 0
        if self.arena is not None:
            self.arena.close()

    def _expire(self) -> None:
        now = self._clock()
        while self._tickets and (first := next(iter(self._tickets.values())))[0] <= now:
            self._tickets.popitem(last=False)
            self.num_expired += 1
            self._drop(first[1])

    def _drop(self, keys: set[bytes]) -> None:
        for key in keys:
            held = self._held[key]
            held.num_tickets -= 1
            if not held.num_tickets:
                del self._held[key]
                self.num_bytes -= held.size

    def _copied(self, wait: Callable[[], Content], size: int) -> Slot | None:
        """A copy of what ``wait`` returns, which has ``size`` bytes; ``None`` if it cannot be read."""
        slot = None if self.arena is None else self.arena.take(size)  # first, so that slots follow each other
        try:
            content = np.frombuffer(wait(), np.uint8)
        except (OctavoError, RuntimeError):  # kept, it would keep the slot
            return None
        if slot is None:
            return Slot(content.copy().data)
        np.frombuffer(slot.view, np.uint8)[:] = content  # other threads run meanwhile
        return slot
