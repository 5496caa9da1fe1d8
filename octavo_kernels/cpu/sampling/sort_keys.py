"""Integers that sort as float32 numbers do: the compiler makes vectors of the largest of integers, not of numbers.

The bits of a number that is not negative sort like it. Those of negative ones do with all bits but the sign flipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo_kernels.cpu.compiled import inlined
from octavo_kernels.cpu.memory import float_bits, int_bits

ALL_BUT_SIGN = np.int32(0x7FFFFFFF)


@inlined
def flipped(bits: Any) -> Any:
    """The key of a number's bits, int32, and the bits of a key."""
    return np.int32(bits ^ np.int32((bits >> np.int32(31)) & ALL_BUT_SIGN))


@inlined
def sort_key(x: Any) -> Any:
    """Of a float32."""
    return flipped(int_bits(x))


@inlined
def of_sort_key(key: Any) -> Any:
    """The float32 that has this key."""
    return float_bits(flipped(key))
