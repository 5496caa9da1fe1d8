"""16-bit numbers in compiled code, as their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import emitted, inlined
from octavo.ops.cpu.memory import float_bits, int_bits
from octavo.ops.cpu.vector_ir import F16, F32, I16


@emitted
def float16_bits(context: Any, x: Any) -> Any:
    """The nearest float16 of a float32, ties to even."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.bitcast(b.fptrunc(args[0], F16), I16)

    return types.uint16(types.float32), emit


@emitted
def float16_value(context: Any, bits: Any) -> Any:
    """A float16 as float32."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.fpext(b.bitcast(args[0], F16), F32)

    return types.float32(types.uint16), emit


@inlined
def bfloat16_bits(x: Any) -> Any:
    """The nearest bfloat16 of a float32, ties to even."""
    bits = np.uint32(int_bits(x))
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.uint16(rounded >> np.uint32(16)) if x == x else np.uint16(0x7FC0)


@inlined
def bfloat16_value(bits: Any) -> Any:
    """A bfloat16 as float32."""
    return float_bits(np.int32(np.uint32(bits) << np.uint32(16)))
