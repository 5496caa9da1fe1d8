"""Helpers for writing vector code as LLVM instructions: sixteen lanes of 32 bits at a time.

numba compiles loops well, but offers no control over which values stay in registers. The inner loops here are
therefore emitted instruction by instruction, by ``@intrinsic`` functions that use these helpers. Every
helper takes the ``IRBuilder`` first and emits at its current position. Addresses are 64-bit integers.

No helper reorders floating-point operations, and no fast-math flag is ever set: operations execute as written on every
CPU, which is why a row's bits do not depend on which variant computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from octavo_kernels.cpu.host import VNNI_FEATURES, is_zen, missing

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
I32x16, F32x16 = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
I16x16, F16x16 = ir.VectorType(I16, LANES), ir.VectorType(F16, LANES)
I8x16 = ir.VectorType(I8, LANES)

FLOAT32, BFLOAT16, FLOAT16, E4M3 = 0, 1, 2, 3
"""Number formats in memory, as passed to the intrinsics. E4M3 numbers must not be NaN."""
E4M3_FACTOR = 256.0
"""``load_floats`` returns E4M3 numbers divided by this."""
FORMAT_BYTES = (4, 2, 2, 1)

LINE_BYTES = 64
AHEAD = 4096
"""Prefetch distance in bytes ahead of the weights being multiplied."""

HAS_VNNI = missing(VNNI_FEATURES) is None
BROADCASTS_EACH_TIME = HAS_VNNI and not is_zen()
"""Whether multiplications broadcast their operands from memory, and do not share a register: fewer instructions, but
more loads. On Zen 5 sharing makes products of 64 rows or more 7 to 10 % faster."""
HAS_AVX512 = missing(("avx512f",)) is None
"""There are 32 registers of sixteen lanes then, else as many as hold eight such vectors."""


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def offset(b: ir.IRBuilder, base: ir.Value, *terms: tuple[ir.Value, int]) -> ir.Value:
    """``base`` plus the sum of value * factor over ``terms``."""
    for value, factor in terms:
        base = b.add(base, b.mul(value, i64(factor)))
    return base


def load(b: ir.IRBuilder, kind: ir.Type, address: ir.Value, displacement: int = 0) -> ir.Value:
    """Unaligned load of a scalar or a vector."""
    pointer = b.inttoptr(b.add(address, i64(displacement)), kind.as_pointer())
    return b.load(pointer, align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, displacement: int = 0) -> None:
    """Unaligned store of a scalar or a vector."""
    b.store(value, b.inttoptr(b.add(address, i64(displacement)), value.type.as_pointer()), align=1)


def hidden(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The same address, opaque to the optimizer."""
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], False)


def settled(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The same sixteen floats; whatever is settled is computed in the order of these calls. Needs AVX-512."""
    return b.asm(ir.FunctionType(F32x16, [F32x16]), "", "=v,0", [vector], True)


def ask_for(b: ir.IRBuilder, address: ir.Value, num_bytes: int, displacement: int = 0) -> None:
    """Prefetch cache lines into the second level: hardware prefetchers stop at the end of a page."""
    hints = [ir.Constant(I32, hint) for hint in (0, 2, 1)]  # to read, to the second level, data
    for line in range(0, num_bytes, LINE_BYTES):
        pointer = b.inttoptr(b.add(address, i64(displacement + line)), I8.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])


def splat(b: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """All sixteen lanes set to ``scalar``."""
    kind = ir.VectorType(scalar.type, LANES)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(I32x16, [0] * LANES))


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """All lanes set to a compile-time constant."""
    return ir.Constant(kind, [value] * kind.count)


def shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Lanes selected from ``x`` (0 to 15) and ``y`` (16 to 31)."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def call(b: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic or a C function by name."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return b.call(function, args)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", F32x16, [x, y, z])


def load_floats(b: ir.IRBuilder, number_format: int, address: ir.Value, displacement: int = 0) -> ir.Value:
    """Sixteen neighbouring numbers of a format, as float32 (exact); those of E4M3 are divided by ``E4M3_FACTOR``.

    Exponent and mantissa of an E4M3 number become the upper bits of a float16's. The exponent bias of float16 is 15
    and that of E4M3 is 7, which makes the number smaller by 2 ** 8. It is exact for subnormal numbers too.
    """
    if number_format == FLOAT32:
        return load(b, F32x16, address, displacement)
    if number_format == FLOAT16:
        return b.fpext(load(b, F16x16, address, displacement), F32x16)
    if number_format == E4M3:
        signed = b.sext(load(b, I8x16, address, displacement), I16x16)
        half = b.and_(b.shl(signed, constant(I16x16, 7)), constant(I16x16, 0xBFFF))
        return b.fpext(b.bitcast(half, F16x16), F32x16)
    wide = b.zext(load(b, I16x16, address, displacement), I32x16)
    return b.bitcast(b.shl(wide, constant(I32x16, 16)), F32x16)


def sum_lanes(b: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """The sums over lanes of 16 vectors, as one vector. The order is that of ``sum_one``::

        16 vectors of 16 lanes -> 8 of two halves -> 4 of four quarters -> 2 -> 1

    Each step adds lanes 8, 4, 2, 1 apart, of two vectors at a time.
    """
    return sum_halved(b, halve(b, vectors, LANES // 2))


def sum_halved(b: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """``sum_lanes`` after its first step, which gave eight vectors."""
    while len(parts) > 1:
        parts = halve(b, parts, len(parts) // 2)
    return parts[0]


def halve(b: ir.IRBuilder, parts: Sequence[ir.Value], distance: int) -> list[ir.Value]:
    """One step of ``sum_lanes``: the first half of ``parts`` with the second, adding lanes ``distance`` apart.

    Lanes without the bit ``distance`` get the sums of the first of two vectors, lanes with it those of the second:
    half of the numbers stay in place, which needs no shuffle.
    """
    stay = [lane + LANES * bool(lane & distance) for lane in range(LANES)]
    move = [lane ^ distance for lane in stay]
    half = len(parts) // 2
    pairs = zip(parts[:half], parts[half:], strict=True)
    return [b.fadd(shuffle(b, x, y, stay), shuffle(b, x, y, move)) for x, y in pairs]


def sum_one(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum over the lanes of one vector, adding lanes 8, 4, 2 and then 1 apart."""
    for distance in (8, 4, 2, 1):
        vector = b.fadd(vector, shuffle(b, vector, vector, [(lane + distance) % LANES for lane in range(LANES)]))
    return b.extract_element(vector, ir.Constant(I32, 0))


class Loop:
    """A counted loop with values carried from one iteration to the next.

    ``with Loop(b, count, [first, ...]) as loop:`` gives ``loop.index`` and ``loop.carried``; set
    ``loop.carried`` to the next values inside, and read the last ones from ``loop.results`` afterwards.
    ``count`` may be zero.
    """

    def __init__(self, b: ir.IRBuilder, count: ir.Value, carried: Sequence[ir.Value]) -> None:
        self._b, self._count, self._first = b, count, list(carried)

    def __enter__(self) -> Loop:
        b = self._b
        before = b.block
        self._head = b.append_basic_block("head")
        body = b.append_basic_block("body")
        self._after = b.append_basic_block("after")
        b.branch(self._head)
        b.position_at_end(self._head)
        self.index: Any = b.phi(I64)
        self.index.add_incoming(i64(0), before)
        self.results: list[Any] = [b.phi(value.type) for value in self._first]
        for phi, value in zip(self.results, self._first, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", self.index, self._count), body, self._after)
        b.position_at_end(body)
        self.carried: list[ir.Value] = list(self.results)
        return self

    def __exit__(self, *error: object) -> None:
        b = self._b
        self.index.add_incoming(b.add(self.index, i64(1)), b.block)
        for phi, value in zip(self.results, self.carried, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(self._head)
        b.position_at_end(self._after)


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e ** x per lane for x of at most 88, within 2 units in the last place; 0 below -87, NaN for NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2; e ** r by its series to the sixth power; times 2 ** n by adding n to
    the exponent. ln 2 is split in two so that n times its upper part is exact (Cody and Waite, 1980).
    """
    # Adding 1.5 * 2 ** 23 leaves the nearest integer in the low bits.
    shifted = fma(b, x, constant(F32x16, 1.4426950408889634), constant(F32x16, 12582912.0))
    n = b.fsub(shifted, constant(F32x16, 12582912.0))
    r = fma(b, n, constant(F32x16, -0.693359375), x)
    r = fma(b, n, constant(F32x16, 2.12194440e-4), r)
    series = constant(F32x16, 1 / 720)
    for divisor in (120, 24, 6, 2, 1, 1):
        series = fma(b, series, r, constant(F32x16, 1 / divisor))
    exponent = b.shl(b.bitcast(shifted, I32x16), constant(I32x16, 23))
    result = b.bitcast(b.add(b.bitcast(series, I32x16), exponent), F32x16)
    return b.select(b.fcmp_ordered("<", x, constant(F32x16, -87.0)), constant(F32x16, 0.0), result)


def sigmoid(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """1 / (1 + e ** -x) per lane."""
    e = exp(b, b.fneg(call(b, "llvm.fabs.v16f32", F32x16, [x])))
    one = constant(F32x16, 1.0)
    above = b.select(b.fcmp_ordered("<", x, constant(F32x16, 0.0)), e, one)
    return b.fdiv(above, b.fadd(one, e))


def softplus(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """log(1 + e ** x) per lane, as max(x, 0) + log(1 + e ** -|x|).

    The logarithm is that of 1 + y with y = e ** -|x|, or of 2 (1 + y) with y = (e ** -|x| - 1) / 2, which is between
    sqrt(1/2) and sqrt(2); by the polynomial of Moshier's Cephes library.
    """
    e = exp(b, b.fneg(call(b, "llvm.fabs.v16f32", F32x16, [x])))
    is_small = b.fcmp_ordered("<", e, constant(F32x16, 0.41421356))
    halved = b.fmul(b.fsub(e, constant(F32x16, 1.0)), constant(F32x16, 0.5))
    y = b.select(is_small, e, halved)
    series = constant(F32x16, 7.0376836292e-2)
    for factor in (
        *(-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    ):
        series = fma(b, series, y, constant(F32x16, factor))
    square = b.fmul(y, y)
    log = fma(b, b.fmul(series, y), square, fma(b, square, constant(F32x16, -0.5), y))
    log = b.fadd(log, b.select(is_small, constant(F32x16, 0.0), constant(F32x16, 0.6931471805599453)))
    zero = constant(F32x16, 0.0)
    return b.fadd(b.select(b.fcmp_unordered("<=", x, zero), b.fmul(x, zero), x), log)
