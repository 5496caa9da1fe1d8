"""Greedy sampling: the first of the largest numbers of each row, or why there is none.

Rows are divided into blocks among threads, which compare numbers as integers (``sort_keys.py``).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.sampling import BANNED, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE, OVERFLOWN
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver, compiled_task
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.sampling.sort_keys import ALL_BUT_SIGN, flipped, of_sort_key
from octavo_kernels.cpu.threads import run

BLOCK = 4096
"""Less than a microsecond of work."""
INFINITY = 0x7F800000
ARGUMENTS = fields("task x tokens largest R V B")
"""``largest`` int32 [R, B, 2] is set by the driver: the largest number of each block and the largest without signs."""


@functools.cache
def _task() -> int:
    """Task over the blocks of all rows."""

    def measure(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        largest = view(a.largest, 2 * a.R * a.B, np.int32)
        for item in range(begin, end):
            first = item % a.B * BLOCK
            bits = view(a.x + 4 * (item // a.B * a.V + first), min(BLOCK, a.V - first), np.int32)
            most, widest = np.int32(~ALL_BUT_SIGN), np.int32(0)
            for i in range(len(bits)):
                most = max(most, flipped(bits[i]))
                widest = max(widest, bits[i] & ALL_BUT_SIGN)
            largest[2 * item], largest[2 * item + 1] = most, widest

    return compiled_task(measure)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        a.B = (a.V + BLOCK - 1) // BLOCK
        largest = np.empty((a.R, a.B, 2), np.int32)
        a.largest = largest.ctypes.data
        run(pool, a.task, arguments, a.R * a.B, 1)
        tokens = view(a.tokens, a.R, np.int32)
        for r in range(a.R):
            block, widest = 0, np.int32(0)
            for b in range(a.B):
                if of_sort_key(largest[r, b, 0]) > of_sort_key(largest[r, block, 0]):
                    block = b
                widest = max(widest, largest[r, b, 1])
            place, best = block * BLOCK, of_sort_key(largest[r, block, 0])
            x = view(a.x + 4 * r * a.V, a.V, np.float32)
            while place < a.V - 1 and x[place] != best:
                place += 1
            if widest >= INFINITY:
                place = NOT_FINITE
            elif best == BANNED:
                place = NOTHING_LEFT
            elif best == OVERFLOWN:
                place = OUT_OF_RANGE
            tokens[r] = place
        keep(largest)
        return 0

    return compiled_driver(drive)


def best_tokens(x_RV: Tensor) -> Tensor:
    """int32 [R]: the place of the first largest number of each row of float32 ``x``, or an error code as of
    ``ops.sample``; rows must have at least one number."""
    if missing(FLOAT_FEATURES) is not None:
        return _plain_best_tokens(x_RV)
    x_RV, (R, V) = x_RV.contiguous(), x_RV.shape
    tokens_R, arguments = torch.empty(R, dtype=torch.int32), np.empty(1, ARGUMENTS)
    arguments[0] = _task(), x_RV.data_ptr(), tokens_R.data_ptr(), 0, R, V, 0
    call(_driver(), arguments)
    return tokens_R


def _plain_best_tokens(x_RV: Tensor) -> Tensor:
    best_R, places_R = x_RV.amax(dim=1), torch.from_numpy(x_RV.numpy().argmax(axis=1)).int()
    places_R[best_R == BANNED] = NOTHING_LEFT
    places_R[best_R == OVERFLOWN] = OUT_OF_RANGE
    places_R[~x_RV.isfinite().all(dim=1)] = NOT_FINITE
    return places_R
