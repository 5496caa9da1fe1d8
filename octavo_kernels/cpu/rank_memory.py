"""The memory that the ranks of an engine share: their collectives, the ring of messages, and their results' digests.

Where the layers are divided among stages, neighbouring ranks are of one stage and have a collective of their own, and
there is a ring for each rank that reads what another has computed: that of the stage before, or of the last stage.

Where stages are on several hosts, each has such a memory, of which it uses what its own ranks write and read. Rings
from one host to another are in both, and a link between the hosts reads one and writes the other
(``octavo.runtime.ranks.node_link``).

The memory is an anonymous file whose descriptor the engine process hands to the ranks that it starts. It has no name,
so nothing is left of it when the last of them has ended, however it did.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

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


def _ways(size: int, num_stages: int) -> list[tuple[int, int]]:
    """Pairs of ranks of which the second reads what the first hands on."""
    width = size // num_stages
    last = size - width
    forth = [(rank, rank + width) for rank in range(last)]
    return forth + [(last + rank % width, rank) for rank in range(last)]


def _part_sizes(size: int, num_stages: int) -> list[int]:
    """Bytes of each part: the collective of all, messages, digests; of stages: activities, collectives, rings."""
    sizes = [region_bytes(size), ring_bytes(size - 1), size * 8 * KEPT]
    if num_stages > 1:
        sizes += [size * LINE, *[region_bytes(size // num_stages)] * num_stages]
        sizes += [ring_bytes(1)] * len(_ways(size, num_stages))
    return [_padded(num_bytes) for num_bytes in sizes]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


class MappedRankMemory:
    """One rank's view of the shared memory."""

    channel_bytes = RING_BYTES

    def __init__(self, descriptor: int, rank: int, size: int, num_stages: int = 1, num_nodes: int = 1) -> None:
        self.rank, self.size, self.num_stages = rank, size, num_stages
        self._per_node = size // num_nodes
        first_own = self.node_of(rank) * self._per_node
        own = range(first_own, first_own + self._per_node)
        self.compared: Sequence[int] = sorted({0, *own})
        self._listeners = [other for other in own if other]
        sizes = _part_sizes(size, num_stages)
        region = np.frombuffer(mmap.mmap(descriptor, sum(sizes)), np.uint8)
        first, messages, digests, *others = np.split(region, np.cumsum(sizes)[:-1])
        self.collective = SharedCollective(first, rank, size)
        count = len(self._listeners)
        self.ring = Ring(messages[: ring_bytes(count)], count)
        self._digests = digests.ctypes.data
        self._stages, self._channels = [self.collective], dict[tuple[int, int], Ring]()
        if num_stages > 1:
            width = size // num_stages
            self._activities = others[0].ctypes.data
            self._stages = [SharedCollective(part, rank % width, width) for part in others[1 : 1 + num_stages]]
            for way, part in zip(_ways(size, num_stages), others[1 + num_stages :], strict=True):
                self._channels[way] = Ring(part[: ring_bytes(1)], 1)

    def node_of(self, rank: int) -> int:
        """See ``RankMemory``."""
        return rank // self._per_node

    @property
    def crossing(self) -> list[tuple[int, int]]:
        """See ``RankMemory``."""
        return [way for way in self._channels if self.node_of(way[0]) != self.node_of(way[1])]

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
        return RingReader(self.ring, self._listeners.index(self.rank), check)

    def to_stages(self, check: Check) -> list[RingWriter]:
        """See ``RankMemory``."""
        return [self.writer_of(way, check) for way in self._channels if way[0] == self.rank]

    def from_stage(self, stage: int, check: Check) -> RingReader:
        """See ``RankMemory``."""
        return self.reader_of(self._way(self.rank, stage), check)

    def writer_of(self, way: tuple[int, int], check: Check) -> RingWriter:
        """See ``RankMemory``."""
        return RingWriter(self._channels[way], check)

    def reader_of(self, way: tuple[int, int], check: Check) -> RingReader:
        """See ``RankMemory``."""
        return RingReader(self._channels[way], 0, check)

    def _way(self, rank: int, stage: int) -> tuple[int, int]:
        """From the rank of a stage whose output a rank reads."""
        width = self.size // self.num_stages
        return stage * width + rank % width, rank

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
                ring = self._channels[self._way(rank, activity - WAITS)]
                is_behind = is_behind or ring.written > ring.read(0)
        return (every[rank], of_stage[rank % width], read, activity), is_behind

    def abort(self) -> None:
        """See ``RankMemory``."""
        for collective in (self.collective, *self._stages):
            collective.abort()

    def num_read(self, rank: int) -> tuple[int, bool]:
        """Bytes of messages that a rank has read, and whether these are all; of any but rank 0."""
        read = self.ring.read(self._listeners.index(rank))
        return read, read == self.ring.written

    def write_digest(self, rank: int, number: int, digest: int) -> None:
        """Keep the digest of a rank's results up to step ``number``."""
        publish(self._digest_at(rank, number), digest, 0)

    def digest(self, rank: int, number: int) -> int:
        """A rank's digest of its results up to step ``number``, one of the last few."""
        return int(load(self._digest_at(rank, number)))

    def _digest_at(self, rank: int, number: int) -> int:
        return int(self._digests + 8 * (rank * KEPT + number % KEPT))


class SharedFile:
    """See ``SharedMemory``."""

    def make(self, size: int, descriptor: int | None = None, num_stages: int = 1) -> int:
        return make_memory(size, descriptor, num_stages)

    def view(self, descriptor: int, rank: int, size: int, num_stages: int = 1, num_nodes: int = 1) -> MappedRankMemory:
        return MappedRankMemory(descriptor, rank, size, num_stages, num_nodes)
