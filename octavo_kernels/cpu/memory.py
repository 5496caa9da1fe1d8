"""Raw memory in compiled code: typed views of addresses, atomic words, and waiting for a word to change.

Kernels take tensors as addresses and sizes: numba spends microseconds on unpacking an array, and a step makes hundreds
of calls. The callers in this folder check shapes and contiguity before they pass an address.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing import npydecl
from numba.np import arrayobj

from octavo_kernels.cpu.compiled import emitted, inlined, intrinsic
from octavo_kernels.cpu.host import IS_ARM
from octavo_kernels.cpu.vector_ir import I32, I64, call, i64

arrays: Any = arrayobj
parse_dtype: Any = npydecl.parse_dtype
LINE_FLOATS = 16
CYCLES_A_SECOND = 2_500_000_000
"""What ``cycles`` counts on Arm, whose clocks tick at 24 MHz to 1 GHz."""
FUTEX_SYSCALL = 98 if IS_ARM else 202
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
ULOCK_WAIT, ULOCK_WAIT_SHARED, ULOCK_WAKE_ALL = 1, 3, 0x100
"""Operations and a flag of macOS (bsd/sys/ulock.h of its kernel)."""


@intrinsic
def view(context: Any, address: Any, size: Any, dtype: Any) -> Any:
    """The ``size`` numbers of ``dtype`` at ``address`` as a one-dimensional array."""
    kind = types.Array(parse_dtype(dtype), 1, "C")

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        array, item = arrays.make_array(kind)(c, b), i64(c.get_abi_sizeof(c.get_data_type(kind.dtype)))
        data = b.inttoptr(args[0], array.data.type)
        arrays.populate_array(array, data=data, shape=[args[1]], strides=[item], itemsize=item, meminfo=None)
        return array._getvalue()

    return kind(types.intp, types.intp, dtype), emit


def fields(*names: str) -> np.dtype[np.void]:
    """A record of numbers of 64 bits, int or float, such as the arguments of a task: ``fields("x T K eps:float")``."""
    words = (word.partition(":") for word in " ".join(names).split())
    return np.dtype([(name, np.float64 if kind == "float" else np.int64) for name, _, kind in words])


@intrinsic
def read(context: Any, address: Any, record: Any) -> Any:
    """The record at an address."""
    kind = parse_dtype(record)

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.inttoptr(args[0], c.get_value_type(kind))

    return kind(types.intp, record), emit


@intrinsic
def keep(context: Any, array: Any) -> Any:
    """Keep an array alive up to here: numba frees it after its last use, and using its address does not count."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return c.get_dummy_value()

    return types.void(array), emit


@inlined
def whole_lines(num_rows: Any, width: Any) -> Any:
    """Undefined float32 [num_rows, width], aligned to a cache line: vectors in rows of vectors cross no line."""
    room = np.empty(num_rows * width + LINE_FLOATS, np.float32)
    first = -room.ctypes.data % (4 * LINE_FLOATS) // 4
    return room[first : first + num_rows * width].reshape((num_rows, width))


@emitted(result=types.float32, x=types.int32)
def float_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The float32 whose bits are an int32."""
    return b.bitcast(x, ir.FloatType())


@emitted(result=types.int32, x=types.float32)
def int_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The int32 with the bits of a float32."""
    return b.bitcast(x, I32)


@emitted(result=types.int64)
def atomic_add(b: ir.IRBuilder, address: ir.Value, amount: ir.Value) -> ir.Value:
    """Add to the int64 at an address; returns the previous value."""
    return b.atomic_rmw("add", _word(b, address), amount, "seq_cst")


@emitted(result=types.int64)
def atomic_load(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read the int64 at an address."""
    return b.load_atomic(_word(b, address), "seq_cst", 8)


@emitted()
def atomic_store(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write the int64 at an address."""
    b.store_atomic(value, _word(b, address), "seq_cst", 8)


@emitted()
def publish(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write the int64 at an address after all writes before it, without waiting until others can see it."""
    b.store_atomic(value, _word(b, address), "release", 8)


@emitted(result=types.boolean)
def atomic_swap_if(b: ir.IRBuilder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    """Write the int64 at an address if it still is ``expected``; returns whether it was."""
    return b.extract_value(b.cmpxchg(_word(b, address), expected, value, "seq_cst", "seq_cst"), 1)


def _word(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, I64.as_pointer())


@emitted(result=types.int64)
def cycles(b: ir.IRBuilder) -> ir.Value:
    """The processor's clock: it counts at a constant rate, of 2 to 4 GHz."""
    if not IS_ARM:  # LLVM's intrinsic reads a counter there that programs may not read
        return call(b, "llvm.readcyclecounter", I64, [])
    ticks = _register(b, "llvm.read_volatile_register.i64", "cntvct_el0")
    return b.mul(ticks, b.udiv(i64(CYCLES_A_SECOND), _register(b, "llvm.read_register.i64", "cntfrq_el0")))


def _register(b: ir.IRBuilder, intrinsic: str, name: str) -> ir.Value:
    """The content of a system register."""
    return call(b, intrinsic, I64, [b.module.add_metadata([ir.MetaDataString(b.module, name)])])


@emitted()
def pause(b: ir.IRBuilder) -> None:
    """Hint to the CPU that this thread is spinning."""
    if IS_ARM:
        call(b, "llvm.aarch64.isb", ir.VoidType(), [ir.Constant(I32, 15)])  # where ``yield`` takes no time
    else:
        call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])


@emitted()
def yield_processor(b: ir.IRBuilder) -> None:
    """Let another thread run (``sched_yield``)."""
    call(b, "sched_yield", I32, [])


@emitted()
def futex(b: ir.IRBuilder, address: ir.Value, operation: ir.Value, value: ir.Value, timeout: ir.Value) -> None:
    """Linux's futex: sleep while the int32 at an address is ``value``, or wake ``value`` sleepers.

    ``timeout`` is the address of a ``timespec``, 0 for none. macOS has the same under other names (as libc++ uses it);
    it takes any timeout as one of a millisecond, and wakes one sleeper or all.
    """
    if sys.platform == "darwin":
        _emit_ulock(b, address, operation, value, timeout)
    else:
        call(b, "syscall", I64, [i64(FUTEX_SYSCALL), address, operation, value, timeout, i64(0), i64(0)])


def _emit_ulock(b: ir.IRBuilder, address: ir.Value, operation: ir.Value, value: ir.Value, timeout: ir.Value) -> None:
    is_private = b.icmp_signed(">=", operation, i64(FUTEX_WAIT_PRIVATE))
    kind = b.select(is_private, ir.Constant(I32, ULOCK_WAIT), ir.Constant(I32, ULOCK_WAIT_SHARED))
    with b.if_else(b.trunc(operation, ir.IntType(1))) as (wakes, waits):
        with wakes:
            is_for_all = b.icmp_signed(">", value, i64(1))
            flag = b.select(is_for_all, ir.Constant(I32, ULOCK_WAKE_ALL), ir.Constant(I32, 0))
            call(b, "__ulock_wake", I32, [b.or_(kind, flag), address, i64(0)])
        with waits:
            has_end = b.icmp_signed("!=", timeout, i64(0))
            microseconds = b.select(has_end, ir.Constant(I32, 1000), ir.Constant(I32, 0))
            call(b, "__ulock_wait", I32, [kind, address, value, microseconds])


@emitted()
def call_task(b: ir.IRBuilder, task: ir.Value, arguments: ir.Value, begin: ir.Value, end: ir.Value) -> None:
    """Call the compiled task at an address; see ``compiled.task``."""
    b.call(b.inttoptr(task, ir.FunctionType(ir.VoidType(), [I64, I64, I64]).as_pointer()), [arguments, begin, end])


@emitted(result=types.int64)
def call_driver(b: ir.IRBuilder, driver: ir.Value, pool: ir.Value, arguments: ir.Value) -> ir.Value:
    """Call the compiled driver at an address; see ``compiled.driver``."""
    return b.call(b.inttoptr(driver, ir.FunctionType(I64, [I64, I64]).as_pointer()), [pool, arguments])
