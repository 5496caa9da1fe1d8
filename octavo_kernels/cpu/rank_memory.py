"""The memory that the ranks of an engine share: their collectives, the ring of messages, and their results' digests.

Where the layers are divided among stages, neighbouring ranks are of one stage and have a collective of their own, and
each rank a ring for what its stage has computed: read by the same rank of the next stage, or that of the last by the
same of all others.

The memory is an anonymous file whose descriptor the engine process hands to the ranks that it starts. It has no name,
so nothing is left of it when the last of them has ended, however it did.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from octavo.ops.device_backend import IDLE, WAITS, WORKS, Check
from octavo_kernels.cpu.collective import LINE, SharedCollective, region_bytes
from octavo_kernels.cpu.message_ring import RING_BYTES, Ring, RingReader, RingWriter, ring_bytes
from octavo_kernels.cpu.shared_words import load, publish

KEPT = 64
"""Digests of each rank that are kept; ranks are fewer steps apart when they are compared."""


def make_memory(size: int, descriptor: int | None = None, num_stages: int = 1) -> int:
    """The descriptor of a new memory for ``size`` ranks, in an empty file if the descriptor of one is given."""
    descriptor = os.memfd_create("octavo-ranks") if descriptor is None else descriptor
    os.ftruncate(descriptor, sum(_part_sizes(size, num_stages)))
    return descriptor


def _part_sizes(size: int, num_stages: int) -> list[int]:
    """Bytes of each part: the collective of all, messages, digests; of stages: activities, collectives, rings."""
    sizes = [region_bytes(size), ring_bytes(size - 1), size * 8 * KEPT]
    if num_stages > 1:
        sizes += [size * LINE, *[region_bytes(size // num_stages)] * num_stages]
        sizes += [ring_bytes(num_stages - 1)] * size
    return [_padded(num_bytes) for num_bytes in sizes]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


class MappedRankMemory:
    """One rank's view of the shared memory."""

    channel_bytes = RING_BYTES

    def __init__(self, descriptor: int, rank: int, size: int, num_stages: int = 1) -> None:
        self.rank, self.size, self.num_stages = rank, size, num_stages
        sizes = _part_sizes(size, num_stages)
        region = np.frombuffer(mmap.mmap(descriptor, sum(sizes)), np.uint8)
        first, messages, digests, *others = np.split(region, np.cumsum(sizes)[:-1])
        self.collective = SharedCollective(first, rank, size)
        self.ring = Ring(messages[: ring_bytes(size - 1)], size - 1)
        self._digests = digests.ctypes.data
        self._stages, self._channels = [self.collective], list[Ring]()
        if num_stages > 1:
            width = size // num_stages
            self._activities = others[0].ctypes.data
            self._stages = [SharedCollective(own, rank % width, width) for own in others[1 : 1 + num_stages]]
            for source, own in enumerate(others[1 + num_stages :]):
                num_readers = num_stages - 1 if source // width == num_stages - 1 else 1
                self._channels.append(Ring(own[: ring_bytes(num_readers)], num_readers))

    @property
    def stage(self) -> int:
        """The number of this rank's stage."""
        return self.rank * self.num_stages // self.size

    @property
    def within(self) -> SharedCollective:
        """The collective of the ranks of this stage."""
        return self._stages[self.stage]

    def writer(self, check: Check) -> RingWriter:
        """Of messages for all other ranks."""
        return RingWriter(self.ring, check)

    def reader(self, check: Check) -> RingReader:
        """Of the messages to this rank."""
        return RingReader(self.ring, self.rank - 1, check)

    def to_stages(self, check: Check) -> RingWriter:
        """See ``RankMemory``."""
        return RingWriter(self._channels[self.rank], check)

    def from_stage(self, stage: int, check: Check) -> RingReader:
        """See ``RankMemory``."""
        return RingReader(*self._channel(self.rank, stage), check)

    def _channel(self, rank: int, stage: int) -> tuple[Ring, int]:
        """Where a rank reads what a stage hands on, and as which of its readers."""
        width = self.size // self.num_stages
        reader = rank // width if stage == self.num_stages - 1 else 0
        return self._channels[stage * width + rank % width], reader

    def note(self, activity: int) -> None:
        """See ``RankMemory``."""
        if self.num_stages > 1:
            publish(self._activities + self.rank * LINE, activity, 0)

    def progress(self, rank: int) -> tuple[tuple[int, ...], bool]:
        """See ``RankMemory``."""
        width = self.size // self.num_stages
        own, among = self._stages[rank // width], range(width)
        every = [self.collective.num_rounds(other) for other in range(self.size)]
        of_stage = [own.num_rounds(other) for other in among]
        read, is_all = self.num_read(rank)
        is_behind = not is_all or every[rank] < max(every) or of_stage[rank % width] < max(of_stage)
        activity = IDLE
        if self.num_stages > 1:
            activity = int(load(self._activities + rank * LINE))
            is_behind = is_behind or (activity == WORKS and min(of_stage) == max(of_stage))
            if activity >= WAITS:  # for what may be there already
                ring, reader = self._channel(rank, activity - WAITS)
                is_behind = is_behind or ring.written > ring.read(reader)
        return (every[rank], of_stage[rank % width], read, activity), is_behind

    def abort(self) -> None:
        """See ``RankMemory``."""
        for collective in (self.collective, *self._stages):
            collective.abort()

    def num_read(self, rank: int) -> tuple[int, bool]:
        """Bytes of messages that a rank has read, and whether these are all; of any but rank 0."""
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

    def make(self, size: int, descriptor: int | None = None, num_stages: int = 1) -> int:
        return make_memory(size, descriptor, num_stages)

    def view(self, descriptor: int, rank: int, size: int, num_stages: int = 1) -> MappedRankMemory:
        return MappedRankMemory(descriptor, rank, size, num_stages)
