"""The memory that the ranks of an engine share: their collectives, the ring of messages, and their results' digests.

The memory is an anonymous file whose descriptor the engine process hands to the ranks that it starts. It has no name,
so nothing is left of it when the last of them has ended, however it did.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from octavo.ops.device_backend import Check
from octavo_kernels.cpu.collective import LINE, SharedCollective, region_bytes
from octavo_kernels.cpu.message_ring import Ring, RingReader, RingWriter, ring_bytes
from octavo_kernels.cpu.shared_words import load, publish

KEPT = 16
"""Digests of each rank that are kept; ranks are fewer steps apart when they are compared."""


def make_memory(size: int, descriptor: int | None = None) -> int:
    """The descriptor of a new memory for ``size`` ranks, in an empty file if the descriptor of one is given."""
    descriptor = os.memfd_create("octavo-ranks") if descriptor is None else descriptor
    os.ftruncate(descriptor, _num_bytes(size))
    return descriptor


def _num_bytes(size: int) -> int:
    return _padded(region_bytes(size)) + _padded(ring_bytes(size - 1)) + size * 8 * KEPT


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


class MappedRankMemory:
    """One rank's view of the shared memory."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        region = np.frombuffer(mmap.mmap(descriptor, _num_bytes(size)), np.uint8)
        ring_at = _padded(region_bytes(size))
        digests_at = ring_at + _padded(ring_bytes(size - 1))
        self.collective = SharedCollective(region[:ring_at], rank, size)
        self.ring = Ring(region[ring_at : ring_at + ring_bytes(size - 1)], size - 1)
        self._digests = region[digests_at:].ctypes.data

    def writer(self, check: Check) -> RingWriter:
        """Of messages for all other ranks."""
        return RingWriter(self.ring, check)

    def reader(self, check: Check) -> RingReader:
        """Of the messages to this rank."""
        return RingReader(self.ring, self.rank - 1, check)

    def num_read(self, rank: int) -> tuple[int, bool]:
        """Bytes of messages that a rank has read, and whether these are all."""
        read = self.ring.read(rank - 1)
        return read, read == self.ring.written

    def write_digest(self, number: int, digest: int) -> None:
        """Keep the digest of this rank's results up to step ``number``."""
        publish(self._digest_at(self.rank, number), digest, 0)

    def digest(self, rank: int, number: int) -> int:
        """A rank's digest of its results up to step ``number``, one of the last few."""
        return int(load(self._digest_at(rank, number)))

    def _digest_at(self, rank: int, number: int) -> int:
        return int(self._digests + 8 * (rank * KEPT + number % KEPT))


class SharedFile:
    """See ``SharedMemory``."""

    def make(self, size: int, descriptor: int | None = None) -> int:
        return make_memory(size, descriptor)

    def view(self, descriptor: int, rank: int, size: int) -> MappedRankMemory:
        return MappedRankMemory(descriptor, rank, size)
