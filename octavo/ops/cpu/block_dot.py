"""The inner loops of ``block_linear``: sixteen output rows times a few tokens, over all groups of K.

Activations come in two terms, of which the second is there for few groups; see ``quantize``. ``block_dot`` multiplies
the first terms, a few tokens at a time; ``add_second_terms`` goes over those (group, token) pairs that have one.

A panel is 16 rows of the weight, group by group, in the order in which they are used::

    values   4 bit: [group][step][16 rows][4 bytes]     8 bit: [group][step][16 rows][4 bytes]
             low  nibbles: k = 8 step + 0..3            byte:  k = 4 step + 0..3
             high nibbles: k = 8 step + 4..7
    scales   [group][16 rows]  or, for formats with minima,  [group][scale, minimum][16 rows]

so that one 64-byte load is one operand of ``vpdpbusd``: lane r gets row r's next four k. The other operand is
four quantised activations of one token, repeated in every lane.

For each term, the first ones of all groups and then the second ones, in this order and no other::

    total  = sum of weight * activation over the group, exact in int32 (starting from the correction for the
             formats' zero point)
    result = fma(float(total) * activation_scale, weight_scale, result)
    result = fma(minimum, activation_sum, result)                       formats with minima

A token's result is the same instructions on the same numbers whatever the number of tokens beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import emitted, inlined
from octavo.ops.cpu.vector_ir import (
    AHEAD,
    F32,
    FORMAT_BYTES,
    HAS_VNNI,
    I32,
    I64,
    LANES,
    F32x16,
    I32x16,
    Loop,
    ask_for,
    constant,
    dot4,
    fma,
    i64,
    load,
    load_floats,
    offset,
    splat,
    store,
)

STEP_BYTES = 4 * LANES
TOKEN_COUNTS = (12, 8, 4, 2, 1) if HAS_VNNI else (4, 1)
"""Weights are loaded and taken apart once for so many tokens; with the most, all sums just fit the registers."""


def _weights(b: ir.IRBuilder, bits: int, values: ir.Value, step: int) -> list[ir.Value]:
    """The unsigned weights of one 64-byte step: four k for each row, twice that in four bits."""
    packed = load(b, I32x16, values, step * STEP_BYTES)
    if bits == 8:
        return [packed]
    nibble = constant(I32x16, 0x0F0F0F0F)
    return [b.and_(packed, nibble), b.and_(b.lshr(packed, constant(I32x16, 4)), nibble)]


def _steps(b: ir.IRBuilder, bits: int, group: int, values: ir.Value) -> Iterator[ir.Value]:
    """The unsigned weights of a group, four k after four k; loaded one by one, so that they need few registers."""
    for step in range(group * bits // 32):
        yield from _weights(b, bits, values, step)


@inlined
def tokens_at_once(left: int) -> Any:
    """How many of the tokens that are left to take; 16 are rather two times 8 than 12 and 4."""
    for count in TOKEN_COUNTS:
        if count <= left and not (count == 12 and left == 16):
            return count
    return 1


class _Groups:
    """What is known of a panel while code is emitted for it: where its groups are, and how a term is added."""

    def __init__(
        self,
        variant: tuple[int, int, int, int],
        values: ir.Value,
        scales: ir.Value,
        x_scales: ir.Value,
        x_sums: ir.Value,
    ) -> None:
        self.bits, self.group, self.has_minima, self.scale_format = variant
        self._values, self._scales, self._x_scales, self._x_sums = values, scales, x_scales, x_sums

    def values(self, b: ir.IRBuilder, g: ir.Value) -> ir.Value:
        """Address of a group's numbers."""
        return offset(b, self._values, (g, self.group * self.bits // 8 * LANES))

    def scales(self, b: ir.IRBuilder, g: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """A group's scales, and its minima if there are any."""
        row_bytes = LANES * FORMAT_BYTES[self.scale_format]
        pair = offset(b, self._scales, (g, (1 + self.has_minima) * row_bytes))
        scale = load_floats(b, self.scale_format, pair)
        return scale, load_floats(b, self.scale_format, pair, row_bytes) if self.has_minima else None

    def ask_ahead(self, b: ir.IRBuilder, g: ir.Value) -> None:
        """Have what comes about a panel further on brought near."""
        value_bytes = self.group * self.bits // 8 * LANES
        scale_bytes = (1 + self.has_minima) * LANES * FORMAT_BYTES[self.scale_format]
        for base, num_bytes in ((self._values, value_bytes), (self._scales, scale_bytes)):
            ask_for(b, offset(b, base, (g, num_bytes)), num_bytes, AHEAD * num_bytes // value_bytes)

    def start(self, b: ir.IRBuilder, side: ir.Value) -> ir.Value:
        """What a total starts from; ``side`` is the place of a token's term among scales and offsets, in bytes."""
        return constant(I32x16, 0) if self.has_minima else splat(b, load(b, I32, b.add(self._x_sums, side)))

    def add(
        self,
        b: ir.IRBuilder,
        total: ir.Value,
        side: ir.Value,
        scales: tuple[ir.Value, ir.Value | None],
        result: ir.Value,
    ) -> ir.Value:
        """``result`` with a term's total added."""
        scale, minimum = scales
        x_scale = splat(b, load(b, F32, b.add(self._x_scales, side)))
        result = fma(b, b.fmul(b.sitofp(total, F32x16), x_scale), scale, result)
        if minimum is None:
            return result
        return fma(b, minimum, splat(b, load(b, F32, b.add(self._x_sums, side))), result)


def _variant(*constants: Any) -> tuple[Any, ...] | None:
    if all(isinstance(value, types.IntegerLiteral) for value in constants):
        return tuple(value.literal_value for value in constants)
    return None


@emitted
def block_dot(
    context: Any,
    bits: Any,
    group: Any,
    has_minima: Any,
    scale_format: Any,
    values: Any,
    scales: Any,
    activations: Any,
    activation_scales: Any,
    activation_offsets: Any,
    out: Any,
    num_groups: Any,
    num_tokens: Any,
) -> Any:
    """First terms: one panel times ``num_tokens`` rows of activations, one of TOKEN_COUNTS. Four are constants.

    ``activations`` int8 [tokens, 2 K]; ``activation_scales`` float32 [tokens, 2 groups]; ``activation_offsets``
    [tokens, 2 groups]: float32 scaled sums where the format has minima, else the int32 each total starts from.
    ``out`` float32 [tokens, 16]. All are addresses.
    """
    constants = (bits, group, has_minima, scale_format)
    if (variant := _variant(*constants)) is None:
        return None

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        values, scales, x, x_scales, x_sums, out, num_groups, num_tokens = args[4:]
        panel = _Groups(variant, values, scales, x_scales, x_sums)
        for count in TOKEN_COUNTS:
            with b.if_then(b.icmp_signed("==", num_tokens, i64(count))):
                _emit_block_dot(b, count, panel, x, out, num_groups)
        return c.get_dummy_value()

    return types.void(*constants, *([types.intp] * 8)), emit


def _emit_block_dot(
    b: ir.IRBuilder, num_tokens: int, panel: _Groups, x: ir.Value, out: ir.Value, num_groups: ir.Value
) -> None:
    rows = [offset(b, x, (num_groups, 2 * panel.group * token)) for token in range(num_tokens)]
    sides = [b.mul(num_groups, i64(8 * token)) for token in range(num_tokens)]
    with Loop(b, num_groups, [constant(F32x16, 0.0)] * num_tokens) as loop:
        g = loop.index
        here = [offset(b, row, (g, panel.group)) for row in rows]
        at = [offset(b, side, (g, 4)) for side in sides]
        totals = [panel.start(b, side) for side in at]
        for i, weights in enumerate(_steps(b, panel.bits, panel.group, panel.values(b, g))):
            pairs = zip(here, totals, strict=True)
            totals = [dot4(b, total, weights, splat(b, load(b, I32, row, 4 * i))) for row, total in pairs]
        panel.ask_ahead(b, g)
        scales = panel.scales(b, g)
        terms = zip(totals, at, loop.carried, strict=True)
        loop.carried = [panel.add(b, total, side, scales, result) for total, side, result in terms]
    for token, result in enumerate(loop.results):
        store(b, result, out, STEP_BYTES * token)


@emitted
def add_second_terms(
    context: Any,
    bits: Any,
    group: Any,
    has_minima: Any,
    scale_format: Any,
    values: Any,
    scales: Any,
    terms: Any,
    sides: Any,
    out: Any,
    num_groups: Any,
    starts: Any,
    tokens: Any,
) -> Any:
    """Second terms of one panel, added to what ``block_dot`` gave for all tokens.

    ``terms`` int8 [terms, group], ``sides`` [terms, 2]: scale and offset, ``tokens`` int32 [terms], group after group:
    those of group g are at ``starts[g]`` to before ``starts[g + 1]``, int32 too.
    """
    constants = (bits, group, has_minima, scale_format)
    if (variant := _variant(*constants)) is None:
        return None

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        values, scales, terms, sides, out, num_groups, starts, tokens = args[4:]
        panel = _Groups(variant, values, scales, sides, b.add(sides, i64(4)))
        with Loop(b, num_groups, []) as groups:
            g = groups.index
            at = offset(b, starts, (g, 4))
            first, last = (b.sext(load(b, I32, at, place), I64) for place in (0, 4))
            with b.if_then(b.icmp_signed("<", first, last)):
                weights = list(_steps(b, panel.bits, panel.group, panel.values(b, g)))
                factors = panel.scales(b, g)
                with Loop(b, b.sub(last, first), []) as loop:
                    term = b.add(first, loop.index)
                    token = b.sext(load(b, I32, offset(b, tokens, (term, 4))), I64)
                    row, side = offset(b, terms, (term, panel.group)), b.mul(term, i64(8))
                    total = panel.start(b, side)
                    for i, weight in enumerate(weights):
                        total = dot4(b, total, weight, splat(b, load(b, I32, row, 4 * i)))
                    place = offset(b, out, (token, STEP_BYTES))
                    store(b, panel.add(b, total, side, factors, load(b, F32x16, place)), place)
        return c.get_dummy_value()

    return types.void(*constants, *([types.intp] * 8)), emit
