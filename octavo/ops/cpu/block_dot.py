"""The inner loop of ``block_linear``: sixteen output rows times a few tokens, over all groups of K.

A panel is 16 rows of the weight, group by group, in the order in which they are used::

    values   4 bit: [group][step][16 rows][4 bytes]     8 bit: [group][step][16 rows][4 bytes]
             low  nibbles: k = 8 step + 0..3            byte:  k = 4 step + 0..3
             high nibbles: k = 8 step + 4..7
    scales   [group][16 rows]  or, for formats with minima,  [group][scale, minimum][16 rows]

so that one 64-byte load is one operand of ``vpdpbusd``: lane r gets row r's next four k. The other operand is
four quantised activations of one token, repeated in every lane.

For each group, in this order and no other::

    total  = sum of weight * activation over the group, exact in int32 (starting from the correction for the
             formats' zero point)
    result = fma(float(total) * activation_scale, weight_scale, result)
    result = fma(minimum, activation_sum, result)                       formats with minima

A token's result is the same instructions on the same numbers whatever the number of tokens beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import emitted
from octavo.ops.cpu.vector_ir import (
    FORMAT_BYTES,
    I32,
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
TOKEN_COUNTS = (8, 4, 1)
"""Weights are loaded and taken apart once for so many tokens; with 8, all sums just fit the registers."""


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
    out_stride: Any,
    num_groups: Any,
    num_tokens: Any,
) -> Any:
    """One panel times ``num_tokens`` rows of activations, one of TOKEN_COUNTS. The first four are constants.

    ``activations`` int8 [tokens, K]; ``activation_scales`` float32 [tokens, groups]; ``activation_offsets``
    [tokens, groups]: float32 scaled sums where the format has minima, else the int32 each total starts from.
    ``out`` float32: 16 numbers for each token, ``out_stride`` bytes apart. All are addresses.
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

    return types.void(*constants, *([types.intp] * 9)), emit


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
    out_stride: ir.Value,
    num_groups: ir.Value,
) -> None:
    tokens = [i64(token) for token in range(num_tokens)]
    rows = [offset(b, activations, (b.mul(num_groups, t), group)) for t in tokens]
    side = [b.mul(num_groups, t) for t in tokens]
    row_bytes = LANES * FORMAT_BYTES[scale_format]
    with Loop(b, num_groups, [constant(F32x16, 0.0)] * num_tokens) as loop:
        g = loop.index
        starts = [constant(I32x16, 0)] * num_tokens
        offsets = [splat(b, load(b, I32, offset(b, activation_offsets, (s, 4), (g, 4)))) for s in side]
        if not has_minima:
            starts = offsets
        panel = offset(b, values, (g, group * bits // 8 * LANES))
        here = [offset(b, row, (g, group)) for row in rows]
        totals = _group_totals(b, bits, group, panel, here, starts)
        pair = offset(b, scales, (g, (1 + has_minima) * row_bytes))
        scale = load_floats(b, scale_format, pair)
        results = []
        for s, total, result in zip(side, totals, loop.carried, strict=True):
            activation_scale = splat(b, load(b, F32x16.element, offset(b, activation_scales, (s, 4), (g, 4))))
            results.append(fma(b, b.fmul(b.sitofp(total, F32x16), activation_scale), scale, result))
        if has_minima:
            minimum = load_floats(b, scale_format, pair, row_bytes)
            sums = [b.bitcast(value, F32x16) for value in offsets]
            results = [fma(b, minimum, x, result) for x, result in zip(sums, results, strict=True)]
        loop.carried = results
    for t, result in zip(tokens, loop.results, strict=True):
        store(b, result, b.add(out, b.mul(out_stride, t)))
