"""Collectives of ranks that are processes of one machine, through memory that they share.

Each rank has a flag, the number of its last round, and a slot for each of two phases. In a round, a rank writes its
numbers to its slot of phase ``round % 2``, raises its flag, waits for the flags of the others and reads all slots in
the order of ranks. No barrier is needed: a rank writes to a slot again two rounds later, and by then every rank has
raised its flag for the round between, after it had read the slot. Tensors larger than a slot take several rounds.

The calls are made by compiled drivers, so that recordings of steps contain them. A rank waits as long as it takes,
until the ``ABORT`` word is set: whoever watches the ranks sets it when one of them is gone or stuck.

Layout: the ``ABORT`` word; the flag of each rank; for each phase and rank, a slot: its kind and size, then the numbers.
All are on cache lines of their own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import RanksLost
from octavo.ops.collective import exchanged_rows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, inlined
from octavo_kernels.cpu.memory import atomic_load, atomic_store, fields, read, view
from octavo_kernels.cpu.shared_words import MILLISECOND, load, publish, wait_while

LINE = 64
ABORT, FLAGS = 0, LINE
SLOT_BYTES = 1 << 20
"""A step of a few tokens takes one round; a long prompt, one for each megabyte."""
YIELDS = 50
"""Before a rank looks whether others are gone: where the processor has other work, each may last for milliseconds."""
LOOKS = 1000
"""Before a rank sleeps: 15 ms and more, longer than ranks are apart when all of them run."""
SUM, GATHER, ROWS = 1, 2, 3
ABORTED, MISMATCH = 1, 2
LOST = "the ranks are out of step, or one of them is gone"
ARGUMENTS = fields("region rank size slot_bytes x out count nap")
ROW_ARGUMENTS = fields("region rank size slot_bytes x out count nap places row_bytes num_places")

Region = npt.NDArray[np.uint8]


def region_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of the memory that ``size`` ranks share, which must be zeros at first."""
    return FLAGS + size * LINE + 2 * size * (LINE + slot_bytes)


@inlined
def _phase(region: int, rank: int, size: int, stride: int) -> int:
    """The address of the slots of this rank's next round."""
    number: int = atomic_load(region + FLAGS + rank * LINE) + 1
    return region + FLAGS + size * LINE + (number & 1) * size * stride


@inlined
def _meet(region: int, rank: int, size: int, phase: int, stride: int, kind: int, count: int, nap: int) -> int:
    """Raise this rank's flag, its slot being written, and wait for all others; 0 on success."""
    head = view(phase + rank * stride, 2, np.int64)
    head[0] = kind
    head[1] = count
    number = atomic_load(region + FLAGS + rank * LINE) + 1
    atomic_store(region + FLAGS + rank * LINE, number)
    for r in range(size):
        flag = region + FLAGS + r * LINE
        found = atomic_load(flag)
        looks = 0
        while found < number:
            if atomic_load(region + ABORT) != 0:
                return ABORTED
            looks += 1
            wait_while(flag, found, YIELDS, 1 if looks % LOOKS == 0 else 0, nap)
            found = atomic_load(flag)
        head = view(phase + r * stride, 2, np.int64)
        if head[0] != kind or head[1] != count:
            return MISMATCH
    return 0


@driver
def _sum_driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    stride, most, begin = LINE + a.slot_bytes, a.slot_bytes // 4, 0
    while begin < a.count:
        n = min(most, a.count - begin)
        phase = _phase(a.region, a.rank, a.size, stride)
        x = view(a.x + 4 * begin, n, np.float32)
        view(phase + a.rank * stride + LINE, n, np.float32)[:] = x
        failed: int = _meet(a.region, a.rank, a.size, phase, stride, SUM, n, a.nap)
        if failed:
            return failed
        x[:] = view(phase + LINE, n, np.float32)
        for r in range(1, a.size):
            x += view(phase + r * stride + LINE, n, np.float32)
        if a.out:
            view(a.out + 4 * begin, n, np.float32)[:] += x
        begin += n
    return 0


@driver
def _gather_driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    stride, begin = LINE + a.slot_bytes, 0
    while begin < a.count:
        n = min(a.slot_bytes, a.count - begin)
        phase = _phase(a.region, a.rank, a.size, stride)
        view(phase + a.rank * stride + LINE, n, np.uint8)[:] = view(a.x + begin, n, np.uint8)
        failed: int = _meet(a.region, a.rank, a.size, phase, stride, GATHER, n, a.nap)
        if failed:
            return failed
        for r in range(a.size):
            part = view(phase + r * stride + LINE, n, np.uint8)
            view(a.out + r * a.count + begin, n, np.uint8)[:] = part
        begin += n
    return 0


@driver
def _rows_driver(pool: int, arguments: int) -> int:
    """Each round is for so many places as have room in a slot: how many rows there are, their places, the rows."""
    a = read(arguments, ROW_ARGUMENTS)
    stride, width = LINE + a.slot_bytes, a.row_bytes
    most, own = (a.slot_bytes - 8) // (8 + width), a.num_places // a.size
    places, first_own = view(a.places, a.count, np.int64), a.rank * own
    for begin in range(0, a.num_places, most):
        end = min(begin + most, a.num_places)
        phase = _phase(a.region, a.rank, a.size, stride)
        slot = phase + a.rank * stride + LINE
        sent, rows = view(slot, 1 + most, np.int64), slot + 8 * (1 + most)
        n = 0
        for i in range(a.count):
            if begin <= places[i] < end:
                sent[1 + n] = places[i]
                view(rows + n * width, width, np.uint8)[:] = view(a.x + i * width, width, np.uint8)
                n += 1
        sent[0] = n
        failed: int = _meet(a.region, a.rank, a.size, phase, stride, ROWS, end, a.nap)
        if failed:
            return failed
        for r in range(a.size):
            slot = phase + r * stride + LINE
            sent, rows = view(slot, 1 + most, np.int64), slot + 8 * (1 + most)
            for i in range(sent[0]):
                place = sent[1 + i] - first_own
                if 0 <= place < own:
                    row = view(rows + i * width, width, np.uint8)
                    view(a.out + place * width, width, np.uint8)[:] = row
    return 0


class SharedCollective:
    """The collective of one rank, over ``region_bytes`` of shared memory; see ``ops.collective``.

    Calls raise ``RanksLost``.
    """

    def __init__(self, region: Region, rank: int, size: int, slot_bytes: int = SLOT_BYTES) -> None:
        assert len(region) >= region_bytes(size, slot_bytes), "the shared memory is too small"
        self.rank, self.size = rank, size
        self._region, self._slot_bytes = region, slot_bytes

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Collective``."""
        if x_TD.dtype != torch.float32:
            sum_TD = self.all_reduce(x_TD.float(), None if residual_TD is None else residual_TD.float())
            return sum_TD.to(x_TD.dtype)
        if residual_TD is None:
            x_TD = x_TD.contiguous()
            self._call(_sum_driver(), x_TD, 0, x_TD.numel())
            return x_TD
        assert residual_TD.is_contiguous(), "all_reduce adds to the residual in place"
        self._call(_sum_driver(), x_TD.contiguous(), residual_TD.data_ptr(), x_TD.numel())
        return residual_TD

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collective``."""
        x = x.contiguous()
        out = torch.empty(self.size, *x.shape, dtype=x.dtype)
        self._call(_gather_driver(), x, out.data_ptr(), x.nbytes)
        return out

    def all_to_all(self, x_RD: Tensor, places_R: Tensor, num_places: int) -> Tensor:
        """See ``Collective``; a row is shorter than a slot."""
        x_RD, places_R = x_RD.contiguous(), places_R.contiguous()
        row_bytes = x_RD.shape[1] * x_RD.itemsize
        assert 16 + row_bytes <= self._slot_bytes, "a row is longer than a slot"
        out_nD = x_RD.new_zeros(num_places // self.size, x_RD.shape[1])
        more = places_R.data_ptr(), row_bytes, num_places
        self._call(_rows_driver(), x_RD, out_nD.data_ptr(), len(x_RD), ROW_ARGUMENTS, more)
        return out_nD

    def exchange(self, x_TPX: Tensor) -> Tensor:
        """See ``Collective``."""
        return exchanged_rows(self, x_TPX)

    def num_rounds(self, rank: int) -> int:
        """Rounds that a rank has begun."""
        return int(load(self._region.ctypes.data + FLAGS + rank * LINE))

    def abort(self) -> None:
        """Make all collectives fail that are waiting, on all ranks, and all later ones."""
        publish(self._region.ctypes.data + ABORT, 1, 0)

    def _call(
        self,
        driver: int,
        x: Tensor,
        out: int,
        count: int,
        kinds: np.dtype[np.void] = ARGUMENTS,
        more: tuple[int, ...] = (),
    ) -> None:
        own = self._region.ctypes.data, self.rank, self.size, self._slot_bytes
        try:
            call(driver, kinds, (*own, x.data_ptr(), out, count, MILLISECOND.ctypes.data, *more), LOST)
        except IndexError as error:
            raise RanksLost(LOST) from error
