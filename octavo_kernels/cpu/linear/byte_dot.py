"""Sums of four products of bytes a lane, in 32 bits, by the instruction that the processor has for them."""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.binding
from llvmlite import ir

from octavo_kernels.cpu.host import IS_ARM, missing
from octavo_kernels.cpu.vector_ir import HAS_VNNI, I8, I16, I32, LANES, I16x16, I32x16, call, constant, shuffle

VPDPBUSD, VPDPBUSD_256, VPMADDUBSW, USDOT, SDOT, PLAIN = range(6)
LANES_AT_ONCE = {VPDPBUSD: 16, VPDPBUSD_256: 8, VPMADDUBSW: 8, USDOT: 4, SDOT: 4, PLAIN: 16}
ONES, SIGN_BITS = 0x01010101, 0x80808080
"""In each of the four bytes of a word."""
_TYPED_BYTES = llvmlite.binding.llvm_version_info[0] >= 21
"""Whether LLVM's intrinsics for x86 take bytes, not words of four."""


def _chosen() -> int:
    """The instruction for this processor."""
    if HAS_VNNI:
        return VPDPBUSD
    if not IS_ARM:
        return VPDPBUSD_256 if missing(("avxvnni",)) is None else VPMADDUBSW
    if missing(("i8mm",)) is None:
        return USDOT
    return SDOT if missing(("dotprod",)) is None else PLAIN


INSTRUCTION = _chosen()


def add_multiple(b: ir.IRBuilder, total: ir.Value, dot: ir.Value, multiple: ir.Value) -> ir.Value:
    """``total + dot * multiple``, where both of these fit 16 bits; by one instruction with VNNI (``vpdpwssd``)."""
    if INSTRUCTION in (USDOT, SDOT, PLAIN):
        return b.add(total, b.mul(dot, multiple))
    low = b.and_(multiple, constant(I32x16, 0xFFFF))
    if HAS_VNNI:
        halves = [b.bitcast(x, ir.VectorType(I16, 2 * LANES)) for x in (dot, low)]
        return b.add(total, call(b, "llvm.x86.avx512.pmaddw.d.512", I32x16, halves))
    products = []
    for lanes in (range(LANES // 2), range(LANES // 2, LANES)):
        products.append(_add_neighbours(b, *(b.bitcast(shuffle(b, x, x, lanes), I16x16) for x in (dot, low))))
    return b.add(total, shuffle(b, products[0], products[1], range(LANES)))


class Dot4:
    """Totals per lane, to which the sums of four products of unsigned and signed bytes are added, exactly.

    With VNNI (``vpdpbusd``) and Arm's i8mm (``usdot``) that is one instruction. Arm's ``sdot`` takes signed bytes
    only: unsigned ones of 8 bits are less 128 there, and 128 times the sums of the signed ones are added at the end.
    With AVX2 alone, two neighbouring products of weights of up to 7 bits are added in 16 bits (``vpmaddubsw``), which
    hold the sums of a few steps more; ``total`` widens them.
    """

    def __init__(self, b: ir.IRBuilder, total: ir.Value, bits: int) -> None:
        """``bits``: of the unsigned bytes. The signed ones are from -127 to 127."""
        self._bits = bits
        self._totals = _parts(b, total)
        self._room = ((1 << 15) - 1) // (2 * 127 * ((1 << bits) - 1))
        """Steps whose sums fit 16 bits; 0 if not even one's do."""
        self._steps = 0
        self._sums: list[ir.Value] = []
        """For each part of the lanes: of these steps, in 16 bits; or of the signed bytes, where these are needed."""

    def add(self, b: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> None:
        """Add a step: four bytes of each in every lane."""
        pairs = list(zip(_parts(b, unsigned), _parts(b, signed), strict=True))
        if INSTRUCTION == VPMADDUBSW and self._room:
            products = [call(b, "llvm.x86.avx2.pmadd.ub.sw", I16x16, [_bytes(b, x) for x in pair]) for pair in pairs]
            self._sums = _added(b, self._sums, products) if self._sums else products
            self._steps += 1
            if self._steps == self._room:
                self._widen(b)
        elif INSTRUCTION in (VPMADDUBSW, PLAIN):
            products = [(_dot4_in_pairs if INSTRUCTION == VPMADDUBSW else _dot4_in_words)(b, *pair) for pair in pairs]
            self._totals = _added(b, self._totals, products)
        elif INSTRUCTION == SDOT and self._bits == 8:
            ones, sign = (constant(self._totals[0].type, bits) for bits in (ONES, SIGN_BITS))
            before = self._sums or [constant(total.type, 0) for total in self._totals]
            self._sums = [_dot(b, total, ones, y) for total, (_, y) in zip(before, pairs, strict=True)]
            pairs = [(b.xor(x, sign), y) for x, y in pairs]
            self._totals = [_dot(b, total, *pair) for total, pair in zip(self._totals, pairs, strict=True)]
        else:
            self._totals = [_dot(b, total, *pair) for total, pair in zip(self._totals, pairs, strict=True)]

    def total(self, b: ir.IRBuilder) -> ir.Value:
        """All that was added, and the total that was there before."""
        if self._sums and INSTRUCTION == SDOT:
            seven = constant(self._sums[0].type, 7)
            self._totals, self._sums = _added(b, self._totals, [b.shl(x, seven) for x in self._sums]), []
        elif self._sums:
            self._widen(b)
        parts = self._totals
        while len(parts) > 1:
            lanes = range(2 * parts[0].type.count)
            parts = [shuffle(b, x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _widen(self, b: ir.IRBuilder) -> None:
        self._totals = _added(b, self._totals, [_add_neighbours(b, sums, constant(I16x16, 1)) for sums in self._sums])
        self._sums, self._steps = [], 0


def _parts(b: ir.IRBuilder, vector: ir.Value) -> list[ir.Value]:
    """Sixteen lanes as vectors of as many as the instruction takes."""
    count = LANES_AT_ONCE[INSTRUCTION]
    if count == LANES:
        return [vector]
    return [shuffle(b, vector, vector, range(first, first + count)) for first in range(0, LANES, count)]


def _added(b: ir.IRBuilder, xs: Sequence[ir.Value], ys: Sequence[ir.Value]) -> list[ir.Value]:
    return [b.add(x, y) for x, y in zip(xs, ys, strict=True)]


def _bytes(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return b.bitcast(words, ir.VectorType(I8, 4 * words.type.count))


def _dot(b: ir.IRBuilder, total: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """``total`` with a part's products added, by one instruction."""
    if INSTRUCTION in (VPDPBUSD, VPDPBUSD_256):
        args = [_bytes(b, x) if _TYPED_BYTES else x for x in (unsigned, signed)]
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}", total.type, [total, *args])
    name = "usdot" if INSTRUCTION == USDOT else "sdot"
    args = [_bytes(b, unsigned), _bytes(b, signed)]
    return call(b, f"llvm.aarch64.neon.{name}.v4i32.v16i8", total.type, [total, *args])


def _add_neighbours(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Sums of two products of 16 bits (``vpmaddwd``)."""
    return call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, LANES // 2), [x, y])


def _dot4_in_pairs(b: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """The sums of four products of bytes of any size, in eight lanes: the even bytes, then the odd ones, as 16-bit
    numbers."""
    u, s = (b.bitcast(x, I16x16) for x in (unsigned, signed))
    eight = constant(I16x16, 8)
    even = b.and_(u, constant(I16x16, 0xFF)), b.ashr(b.shl(s, eight), eight)
    odd = b.lshr(u, eight), b.ashr(s, eight)
    return b.add(*(_add_neighbours(b, *pair) for pair in (even, odd)))


def _dot4_in_words(b: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """The sums of four products of bytes, each as numbers of 32 bits."""
    total, low = constant(I32x16, 0), constant(I32x16, 24)
    for place in range(0, 32, 8):
        u = b.lshr(b.shl(unsigned, constant(I32x16, 24 - place)), low)
        s = b.ashr(b.shl(signed, constant(I32x16, 24 - place)), low)
        total = b.add(total, b.mul(u, s))
    return total
