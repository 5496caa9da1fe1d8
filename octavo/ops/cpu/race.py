"""The tokens that can win the draw of a row. They are few, so that only their noise needs to be computed exactly.

A token's score is its logit minus the logarithm of an exponential variate e = -log(1 - u), where u comes from 32 bits
of a hash (``ops.noise``). As e >= u, no score is above the logit plus -log(u), and log2 of a float32 is at least its
bits, read as a number with 23 binary places, minus 127. Tokens for which that is below a score that was reached are
left out.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.cpu.calls import call
from octavo.ops.cpu.compiled import compiled_driver, compiled_task
from octavo.ops.cpu.host import FLOAT_FEATURES, missing
from octavo.ops.cpu.memory import fields, int_bits, keep, read, view
from octavo.ops.cpu.threads import run

BLOCK = 2048
"""Tokens of a piece: one or two microseconds of work."""
ROUNDING = 1e-4
"""More than float32 loses in a bound and in a score, relative to them."""
ARGUMENTS = fields(
    task=int, logits=int, hashes=int, ids=int, counts=int, V=int, factor=int, offset=int, least=float, found=int
)
"""``found`` is set by the driver: how many of ``ids`` int64 [V] are used."""


@functools.cache
def _task() -> int:
    """Task over blocks of tokens; those of a block are listed from its first place on."""

    def list_possible(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        logits, hashes = view(a.logits, a.V, np.float32), view(a.hashes, a.V, np.uint32)
        ids, counts = view(a.ids, a.V, np.int64), view(a.counts, end, np.int64)
        low, factor, offset = np.uint64(0xFFFFFFFF), np.uint64(a.factor), np.uint64(a.offset)
        bounds, binary_places, log_2 = np.empty(BLOCK, np.float32), np.float32(2.0**-23), np.float32(math.log(2))
        for block in range(begin, end):
            first, count = block * BLOCK, 0
            size = min(BLOCK, a.V - first)
            for i in range(size):
                x = (hashes[first + i] * factor + offset) & low
                x ^= x >> np.uint64(16)
                x = (x * np.uint64(0x7FEB352D)) & low
                x ^= x >> np.uint64(15)
                x = (x * np.uint64(0x846CA68B)) & low
                x ^= x >> np.uint64(16)
                logarithm = np.float32(int_bits(np.float32(np.int64(x)))) * binary_places - np.float32(127 + 32)
                bounds[i] = logits[first + i] - logarithm * log_2
            for i in range(size):
                if bounds[i] >= a.least:
                    ids[first + count] = first + i
                    count += 1
            counts[block] = count
        keep(bounds)

    return compiled_task(list_possible)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        num_blocks = (a.V + BLOCK - 1) // BLOCK
        counts, ids = np.empty(num_blocks, np.int64), view(a.ids, a.V, np.int64)
        a.counts = counts.ctypes.data
        run(pool, a.task, arguments, num_blocks, np.int64(1))  # a literal would be compiled separately
        found = 0
        for block in range(num_blocks):
            for i in range(counts[block]):
                ids[found] = ids[block * BLOCK + i]
                found += 1
        a.found = found
        keep(counts)
        return 0

    return compiled_driver(drive)


def can_narrow() -> bool:
    """Whether ``possible_winners`` works on this machine."""
    return missing(FLOAT_FEATURES) is None


def possible_winners(
    logits_V: Tensor, hashes_V: npt.NDArray[np.uint32], key: tuple[int, int], reached: float
) -> Tensor:
    """Ids, ascending, of at least all tokens whose score is ``reached`` or more.

    ``logits`` float32, contiguous, finite or minus infinity; ``key`` are factor and offset of ``noise.key_of``.
    """
    V = len(logits_V)
    ids = np.empty(V, np.int64)
    least = reached - ROUNDING * (1 + abs(reached))
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (_task(), logits_V.data_ptr(), hashes_V.ctypes.data, ids.ctypes.data, 0, V, *key, least, 0)
    call(_driver(), arguments)
    return torch.from_numpy(ids[: int(arguments["found"][0])])
