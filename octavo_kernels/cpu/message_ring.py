"""Messages from one process to several, through memory that they share: a stream of bytes with one writer.

Layout, in words on cache lines of their own: bytes written so far; readers that sleep; bytes that each reader has read;
then the ring of bytes. A message is its number and its length, then its bytes; one that is longer than the ring passes
through it in pieces. A reader that finds nothing spins for a moment and then sleeps until it is woken.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from octavo.errors import RanksLost
from octavo_kernels.cpu.collective import LINE, Region
from octavo_kernels.cpu.shared_words import MILLISECOND, add, load, publish, wait_for_change

WRITTEN, ASLEEP, READ = 0, LINE, 2 * LINE
RING_BYTES = 4 << 20
HEAD = struct.Struct("<qq")
YIELDS = 500
"""Before a reader sleeps: 0.2 ms and more, as the next step is often decided within that."""
NAP = np.array([1, 0], np.int64)
"""A ``timespec``, one second: a reader looks this often whether it is still needed."""


def ring_bytes(num_readers: int, capacity: int = RING_BYTES) -> int:
    """Bytes of shared memory for a ring, which must be zeros at first."""
    return READ + num_readers * LINE + capacity


class Ring:
    """A view of the ring's memory."""

    def __init__(self, region: Region, num_readers: int) -> None:
        self.start = region.ctypes.data
        self.num_readers = num_readers
        self.bytes = memoryview(region[READ + num_readers * LINE :])  # type: ignore[arg-type]
        self.capacity = len(self.bytes)

    @property
    def written(self) -> int:
        """Bytes written so far."""
        return int(load(self.start + WRITTEN))

    def read(self, reader: int) -> int:
        """Bytes that a reader has read."""
        return int(load(self.start + READ + reader * LINE))


class RingWriter:
    """Writes messages for all readers; blocks while the slowest has the whole ring to read."""

    def __init__(self, ring: Ring, check: Callable[[], None]) -> None:
        """``check`` is called while waiting, and raises when waiting is in vain."""
        self._ring, self._check = ring, check
        self._written = ring.written
        self._number = 0

    def write(self, message: bytes) -> None:
        """Write one message, unless nobody reads any."""
        if not self._ring.num_readers:
            return
        self._write(HEAD.pack(self._number, len(message)))
        self._write(message)
        self._number += 1

    def _write(self, data: bytes) -> None:
        ring, rest = self._ring, memoryview(data)
        while rest:
            place = self._written % ring.capacity
            size = min(self._room(), len(rest), ring.capacity - place)
            ring.bytes[place : place + size] = rest[:size]
            self._written += size
            rest = rest[size:]
            publish(ring.start + WRITTEN, self._written, ring.start + ASLEEP)

    def _room(self) -> int:
        """Bytes that may be written now, at least one."""
        ring = self._ring
        while True:
            read, slowest = min((ring.read(i), i) for i in range(ring.num_readers))
            if room := ring.capacity - (self._written - read):
                return room
            self._check()
            wait_for_change(ring.start + READ + slowest * LINE, read, YIELDS, 1, MILLISECOND.ctypes.data)


class RingReader:
    """Reads every message, in order."""

    def __init__(self, ring: Ring, reader: int, check: Callable[[], None]) -> None:
        """``check`` is called now and then while waiting, and raises when no message can come any more."""
        self._ring, self._check = ring, check
        self._own = ring.start + READ + reader * LINE
        self._read = ring.read(reader)
        self._number = 0

    def next(self) -> bytes:
        """Wait for the next message. Raises ``RanksLost`` if it is not the one that must follow."""
        number, size = HEAD.unpack(self._take(HEAD.size))
        if number != self._number:
            raise RanksLost(f"message {number} came in place of message {self._number}")
        self._number += 1
        return self._take(size)

    def _take(self, size: int) -> bytes:
        ring, data = self._ring, bytearray()
        while len(data) < size:
            place = self._read % ring.capacity
            there = min(self._available(), size - len(data), ring.capacity - place)
            data += ring.bytes[place : place + there]
            self._read += there
            publish(self._own, self._read, 0)
        return bytes(data)

    def _available(self) -> int:
        """Bytes that can be read now, at least one."""
        ring = self._ring
        word = ring.start + WRITTEN
        while (available := ring.written - self._read) == 0:
            if wait_for_change(word, self._read, YIELDS, 0, NAP.ctypes.data):
                continue
            add(ring.start + ASLEEP, 1)
            try:
                wait_for_change(word, self._read, 0, 1, NAP.ctypes.data)
            finally:
                add(ring.start + ASLEEP, -1)
            self._check()
        return available
