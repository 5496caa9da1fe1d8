"""The inner loop of ``block_linear``: sixteen output rows times a few tokens, over all groups of K.

Activations come in two terms, of which the second is there for few groups; see ``quantize``. ``order`` lists the
terms to go over: g < G is the first of group g, G + g the second.

A panel is 16 rows of the weight, group by group, in the order in which they are used::

    values   4 bit: [group][step][16 rows][4 bytes]     8 bit: [group][step][16 rows][4 bytes]
             low  nibbles: k = 8 step + 0..3            byte:  k = 4 step + 0..3
             high nibbles: k = 8 step + 4..7
    scales   [group][16 rows]  or, for formats with minima,  [group][scale, minimum][16 rows]

so that one 64-byte load is one operand of ``vpdpbusd``: lane r gets row r's next four k. The other operand is
four quantised activations of one token, repeated in every lane.

For each term, in this order and no other::

    total  = sum of weight * activation over the group, exact in int32 (starting from the correction for the
             formats' zero point)
    result = fma(float(total) * activation_scale, weight_scale, result)
    result = fma(minimum, activation_sum, result)                       formats with minima

A token's result is the same instructions on the same numbers whatever the number of tokens beside it. A second
term that only another token has counts with a scale and an offset of 0, and so changes nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import emitted, inlined
from octavo.ops.cpu.vector_ir import (
    F32,
    FORMAT_BYTES,
    HAS_VNNI,
    I32,
    I64,
    LANES,
    F32x16,
    I32x16,
    Loop,
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


def _group_totals(
    b: ir.IRBuilder, bits: int, group: int, values: ir.Value, activations: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    """Add one group's products to each token's ``totals``."""
    k = 0
    for step in range(group * bits // 32):
        for weights in _weights(b, bits, values, step):
            totals = [
                dot4(b, total, weights, splat(b, load(b, I32, x, k)))
                for x, total in zip(activations, totals, strict=True)
            ]
            k += 4
    return totals


@inlined
def tokens_at_once(left: int) -> Any:
    """How many of the tokens that are left to take; 16 are rather two times 8 than 12 and 4."""
    for count in TOKEN_COUNTS:
        if count <= left and not (count == 12 and left == 16):
            return count
    return 1


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
    order: Any,
    num_ordered: Any,
    num_tokens: Any,
) -> Any:
    """One panel times ``num_tokens`` rows of activations, one of TOKEN_COUNTS. The first four are constants.

    ``activations`` int8 [tokens, 2 K]; ``activation_scales`` float32 [tokens, 2 groups]; ``activation_offsets``
    [tokens, 2 groups]: float32 scaled sums where the format has minima, else the int32 each total starts from.
    ``order`` int32 [num_ordered]; ``out`` float32 [tokens, 16]. All are addresses.
    """
    constants = (bits, group, has_minima, scale_format)
    if not all(isinstance(value, types.IntegerLiteral) for value in constants):
        return None
    variant = tuple(value.literal_value for value in constants)

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        for count in TOKEN_COUNTS:
            with b.if_then(b.icmp_signed("==", args[-1], i64(count))):
                _emit_block_dot(b, count, *variant, *args[4:-1])
        return c.get_dummy_value()

    return types.void(*constants, *([types.intp] * 10)), emit


def _emit_block_dot(
    b: ir.IRBuilder,
    num_tokens: int,
    bits: int,
    group: int,
    has_minima: int,
    scale_format: int,
    values: ir.Value,
    scales: ir.Value,
    activations: ir.Value,
    activation_scales: ir.Value,
    activation_offsets: ir.Value,
    out: ir.Value,
    num_groups: ir.Value,
    order: ir.Value,
    num_ordered: ir.Value,
) -> None:
    rows = [b.add(activations, b.mul(num_groups, i64(2 * group * token))) for token in range(num_tokens)]
    sides = [b.mul(num_groups, i64(8 * token)) for token in range(num_tokens)]
    row_bytes = LANES * FORMAT_BYTES[scale_format]
    with Loop(b, num_ordered, [constant(F32x16, 0.0)] * num_tokens) as loop:
        term = b.sext(load(b, I32, offset(b, order, (loop.index, 4))), I64)
        g = b.select(b.icmp_signed("<", term, num_groups), term, b.sub(term, num_groups))
        here = [offset(b, row, (term, group)) for row in rows]
        at = [offset(b, side, (term, 4)) for side in sides]
        starts = [constant(I32x16, 0)] * num_tokens
        if not has_minima:
            starts = [splat(b, load(b, I32, b.add(activation_offsets, side))) for side in at]
        totals = _group_totals(b, bits, group, offset(b, values, (g, group * bits // 8 * LANES)), here, starts)
        pair = offset(b, scales, (g, (1 + has_minima) * row_bytes))
        scale = load_floats(b, scale_format, pair)
        minimum = load_floats(b, scale_format, pair, row_bytes) if has_minima else None
        results = []
        for side, total, result in zip(at, totals, loop.carried, strict=True):
            x_scale = splat(b, load(b, F32, b.add(activation_scales, side)))
            result = fma(b, b.fmul(b.sitofp(total, F32x16), x_scale), scale, result)
            if minimum is not None:
                x_sum = splat(b, load(b, F32, b.add(activation_offsets, side)))
                result = fma(b, minimum, x_sum, result)
            results.append(result)
        loop.carried = results
    for token, result in enumerate(loop.results):
        store(b, result, out, STEP_BYTES * token)
