"""The first of the largest numbers of each row, and whether all of the row are finite: what greedy sampling needs.

Rows are divided into blocks among threads. Bits of float32 are compared as integers, which vectors can do: those of
negative numbers with all bits but the sign flipped sort like the numbers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.cpu.calls import call
from octavo.ops.cpu.compiled import compiled_driver, compiled_task, inlined
from octavo.ops.cpu.host import FLOAT_FEATURES, missing
from octavo.ops.cpu.memory import fields, float_bits, keep, read, view
from octavo.ops.cpu.threads import run

BLOCK = 4096
"""Less than a microsecond of work."""
INFINITY = 0x7F800000
ALL_BUT_SIGN = 0x7FFFFFFF
ARGUMENTS = fields(task=int, x=int, places=int, values=int, finite=int, largest=int, R=int, V=int, B=int)
"""``largest`` int32 [R, B, 2] is set by the driver: the largest number of each block and the largest without signs."""


class Best(NamedTuple):
    """Of each row: the first place of its largest number, that number, and 1 if all numbers are finite, else 0.

    Rows that are not finite have an unspecified place and number.
    """

    places_R: npt.NDArray[np.int64]
    values_R: npt.NDArray[np.float32]
    finite_R: npt.NDArray[np.int64]


@functools.cache
def _task() -> int:
    """Task over the blocks of all rows."""

    def measure(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        largest = view(a.largest, 2 * a.R * a.B, np.int32)
        for item in range(begin, end):
            first = item % a.B * BLOCK
            bits = view(a.x + 4 * (item // a.B * a.V + first), min(BLOCK, a.V - first), np.int32)
            most, widest = np.int32(-ALL_BUT_SIGN - 1), np.int32(0)
            for i in range(len(bits)):
                most = max(most, bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(ALL_BUT_SIGN)))
                widest = max(widest, bits[i] & np.int32(ALL_BUT_SIGN))
            largest[2 * item], largest[2 * item + 1] = most, widest

    return compiled_task(measure)


@inlined
def _number(key: Any) -> Any:
    """The number that sorts as ``key`` does."""
    return float_bits(np.int32(key ^ ((key >> np.int32(31)) & np.int32(ALL_BUT_SIGN))))


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        a.B = (a.V + BLOCK - 1) // BLOCK
        largest = np.empty((a.R, a.B, 2), np.int32)
        a.largest = largest.ctypes.data
        run(pool, a.task, arguments, a.R * a.B, np.int64(1))  # a literal would be compiled separately
        places, values = view(a.places, a.R, np.int64), view(a.values, a.R, np.float32)
        finite = view(a.finite, a.R, np.int64)
        for r in range(a.R):
            block, widest = 0, np.int32(0)
            for b in range(a.B):
                if _number(largest[r, b, 0]) > _number(largest[r, block, 0]):
                    block = b
                widest = max(widest, largest[r, b, 1])
            place, best = block * BLOCK, _number(largest[r, block, 0])
            x = view(a.x + 4 * r * a.V, a.V, np.float32)
            while place < a.V - 1 and x[place] != best:
                place += 1
            places[r], values[r], finite[r] = place, best, widest < INFINITY
        keep(largest)
        return 0

    return compiled_driver(drive)


def best_tokens(x_RV: npt.NDArray[np.float32]) -> Best:
    """See ``Best``; rows must have at least one number."""
    if missing(FLOAT_FEATURES) is not None:
        places_R = np.array([x_V.argmax() for x_V in x_RV], np.int64)
        return Best(
            places_R, x_RV[np.arange(len(x_RV)), places_R], np.array([np.isfinite(x_V).all() for x_V in x_RV], np.int64)
        )
    x_RV, (R, V) = np.ascontiguousarray(x_RV), x_RV.shape
    found = Best(np.empty(R, np.int64), np.empty(R, np.float32), np.empty(R, np.int64))
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (_task(), x_RV.ctypes.data, *(x.ctypes.data for x in found), 0, R, V, 0)
    call(_driver(), arguments)
    return found
