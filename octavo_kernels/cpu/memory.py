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

from octavo_kernels.cpu.compiled import emitted, inlined
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


@emitted
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


@emitted
def read(context: Any, address: Any, record: Any) -> Any:
    """The record at an address."""
    kind = parse_dtype(record)

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.inttoptr(args[0], c.get_value_type(kind))

    return kind(types.intp, record), emit


@emitted
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


@emitted
def float_bits(context: Any, x: Any) -> Any:
    """The float32 whose bits are an int32."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


@emitted
def int_bits(context: Any, x: Any) -> Any:
    """The int32 with the bits of a float32."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.bitcast(args[0], I32)

    return types.int32(types.float32), emit


@emitted
def atomic_add(context: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address; returns the previous value."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), emit


@emitted
def atomic_load(context: Any, address: Any) -> Any:
    """Read the int64 at an address."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.intp), emit


def _store(ordering: str) -> Any:
    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), ordering, 8)
        return c.get_dummy_value()

    return types.void(types.intp, types.int64), emit


@emitted
def atomic_store(context: Any, address: Any, value: Any) -> Any:
    """Write the int64 at an address."""
    return _store("seq_cst")


@emitted
def publish(context: Any, address: Any, value: Any) -> Any:
    """Write the int64 at an address after all writes before it, without waiting until others can see it."""
    return _store("release")


@emitted
def cycles(context: Any) -> Any:
    """The processor's clock: it counts at a constant rate, of 2 to 4 GHz."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        if not IS_ARM:  # LLVM's intrinsic reads a counter there that programs may not read
            return call(b, "llvm.readcyclecounter", I64, [])
        ticks = _register(b, "llvm.read_volatile_register.i64", "cntvct_el0")
        return b.mul(ticks, b.udiv(i64(CYCLES_A_SECOND), _register(b, "llvm.read_register.i64", "cntfrq_el0")))

    return types.int64(), emit


def _register(b: ir.IRBuilder, intrinsic: str, name: str) -> ir.Value:
    """The content of a system register."""
    return call(b, intrinsic, I64, [b.module.add_metadata([ir.MetaDataString(b.module, name)])])


@emitted
def atomic_swap_if(context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write the int64 at an address if it still is ``expected``; returns whether it was."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        pointer = b.inttoptr(args[0], I64.as_pointer())
        return b.extract_value(b.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.intp, types.int64, types.int64), emit


@emitted
def pause(context: Any) -> Any:
    """Hint to the CPU that this thread is spinning."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        if IS_ARM:
            call(b, "llvm.aarch64.isb", ir.VoidType(), [ir.Constant(I32, 15)])  # where ``yield`` takes no time
        else:
            call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return c.get_dummy_value()

    return types.void(), emit


@emitted
def yield_processor(context: Any) -> Any:
    """Let another thread run (``sched_yield``)."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        call(b, "sched_yield", I32, [])
        return c.get_dummy_value()

    return types.void(), emit


@emitted
def futex(context: Any, address: Any, operation: Any, value: Any, timeout: Any) -> Any:
    """Linux's futex: sleep while the int32 at an address is ``value``, or wake ``value`` sleepers.

    ``timeout`` is the address of a ``timespec``, 0 for none. macOS has the same under other names (as libc++ uses it);
    it takes any timeout as one of a millisecond, and wakes one sleeper or all.
    """

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        if sys.platform == "darwin":
            _emit_ulock(b, *args)
        else:
            call(b, "syscall", I64, [i64(FUTEX_SYSCALL), *args, i64(0), i64(0)])
        return c.get_dummy_value()

    return types.void(types.intp, types.int64, types.int64, types.intp), emit


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


@emitted
def call_task(context: Any, task: Any, arguments: Any, begin: Any, end: Any) -> Any:
    """Call the compiled task at an address; see ``compiled.compiled_task``."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), list(args[1:]))
        return c.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64, types.int64), emit


@emitted
def call_driver(context: Any, driver: Any, pool: Any, arguments: Any) -> Any:
    """Call the compiled driver at an address; see ``compiled.compiled_driver``."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        kind = ir.FunctionType(I64, [I64, I64])
        return b.call(b.inttoptr(args[0], kind.as_pointer()), list(args[1:]))

    return types.int64(types.intp, types.intp, types.intp), emit
