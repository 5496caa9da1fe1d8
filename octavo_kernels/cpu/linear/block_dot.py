"""The inner loops of ``block_linear``: sixteen or 32 output rows times a few tokens, over all groups of K.

Activations are a term for each group, and a few large parts of four numbers; see ``quantize``. ``block_dot``
multiplies the terms, a few tokens at a time; ``add_large_parts`` adds the large parts, token by token.

A panel is 16 rows of the weight, group by group, in the order in which they are used::

    values   4 bit: [group][step][16 rows][4 bytes]     8 bit: [group][step][16 rows][4 bytes]
             low  nibbles: k = 8 step + 0..3            byte:  k = 4 step + 0..3
             high nibbles: k = 8 step + 4..7
             5 and 6 bit: the same, then the upper bits of all k, see ``PackedBlocks``
    scales   [group][16 rows]  or, for formats with minima,  [group][scale, minimum][16 rows]; or see ``block_scales``

so that one 64-byte load is one operand of ``vpdpbusd``: lane r gets row r's next four k. The other operand is
four quantised activations of one token, broadcast to every lane. A few tokens are multiplied with a packed panel. For
more, ``take_apart`` unpacks two panels into scratch memory, as a *pair*: a byte for each weight, float32 scales, so
that each broadcast activation serves two panels, and only multiplications are left to do for each token::

    pair     [group][panel][steps of 8 bit, then scale, minimum]      all of 64 bytes

For each term, and then for each large part without minima, in this order and no other::

    total  = sum of weight * activation over the group, exact in int32 (starting from the correction for the
             formats' zero point)
    result = fma(minimum, activation_sum, result)                       formats with minima
    result = fma(float(total) * activation_scale, weight_scale, result)

In formats whose groups are joined, see ``block_scales``, ``total`` is of numbers times multiples: with a packed panel,
the sum of each group's total times its multiple; a pair has the numbers times multiples. Minima are added one by one.

A token's result has the same bits whatever the number of tokens: ``total`` is exact, and all else is computed by the
same instructions, or by others that round the same number once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from octavo_kernels.cpu.compiled import Constant, emitted, inlined
from octavo_kernels.cpu.host import is_zen, missing
from octavo_kernels.cpu.linear.block_scales import (
    JOINED,
    JOINED_GROUP,
    joined_group,
    load_multiple,
    load_scales,
    scale_bytes,
    times_multiple,
)
from octavo_kernels.cpu.linear.byte_dot import INSTRUCTION, VPMADDUBSW, Dot4, add_multiple
from octavo_kernels.cpu.linear.quantize import (
    OFFSET,
    OFFSETS,
    PART_WORDS,
    ROUNDER_BITS,
    START,
    TOKENS_TOGETHER,
    term_bytes,
)
from octavo_kernels.cpu.linear.tile_dot import WEIGHT_TILE, X_TILE, declines, tile_call, tile_load, tile_store
from octavo_kernels.cpu.vector_ir import (
    BROADCASTS_EACH_TIME,
    F32,
    FLOAT32,
    HAS_VNNI,
    I32,
    I64,
    LANES,
    F32x16,
    I32x16,
    Loop,
    ask_for,
    constant,
    fma,
    hidden,
    i64,
    load,
    offset,
    settled,
    splat,
    store,
)

alloca_once: Any = cgutils.alloca_once
STEP_BYTES = 4 * LANES
ONE_PANEL, PAIR, PAIR_IN_TILES = 0, 1, 2
"""What ``block_dot`` multiplies with; and whether in Intel's tiles (AMX), for which see ``_emit_tile_dot``."""
TOKEN_COUNTS = (*(((8, 6, 4, 2, 1), (6, 4, 2, 1)) if HAS_VNNI else ((4, 2, 1), (2, 1))), (TOKENS_TOGETHER, 6, 4, 2, 1))
"""Tokens multiplied at once, by operand: with the largest, all sums fit the registers, those of pairs just so."""

Scales = tuple[ir.Value, list[ir.Value]]
"""A group's scales, and its minima: none, or of each group of the weight."""


def pair_from(scale_format: int) -> int:
    """Fewest tokens for which panels are unpacked to pairs.

    On Zen 5 products of 16 are faster without, by 6 % in Q4_0 and 20 % with minima. Joined groups have numbers of 8
    bits, which AVX2 alone multiplies slowly.
    """
    if scale_format == JOINED and INSTRUCTION == VPMADDUBSW:
        return 1 << 62
    return 24 if is_zen() else 12


@inlined
def tokens_at_once(row: int, end: int, operand: int, G: int) -> Any:
    """How many tokens to multiply with G groups from ``row`` on: their terms are adjacent."""
    left = min(end, (row // TOKENS_TOGETHER + 1) * TOKENS_TOGETHER) - row
    for count in TOKEN_COUNTS[operand]:
        if count <= left and (count < TOKENS_TOGETHER or G % 2 == 0):
            return count
    return 1


class _Form:
    """Number format and sizes in bytes of a panel."""

    def __init__(self, bits: int, group: int, has_minima: int, scale_format: int) -> None:
        self.bits, self.group, self.parts, self.scale_format = bits, group, 1 + has_minima, scale_format
        self.number_bits = bits
        """Of the numbers, in whatever they are stored."""
        self.joined = group // JOINED_GROUP if scale_format == JOINED else 1
        """Groups of the weight in one of activations."""
        self.num_dots = 1
        """Totals of which the total of a group is made."""
        self.value_bytes = group * bits // 8 * LANES
        self.scale_bytes = scale_bytes(scale_format, group, self.parts)
        self.num_factors = 1 + has_minima * self.joined
        self.pair_bytes = 2 * (group + 4 * self.num_factors) * LANES
        self.term_bytes = term_bytes(group, self.joined)

    def weights(self, b: ir.IRBuilder, values: ir.Value) -> Iterator[ir.Value]:
        """A group's unsigned weights, four k at a time; loaded one by one, to use few registers."""
        if self.bits == 8:
            for step in range(self.group // 4):
                yield load(b, I32x16, values, step * STEP_BYTES)
            return
        nibble, width = constant(I32x16, 0x0F0F0F0F), self.bits - 4
        high = load(b, I32x16, values, self.group // 8 * STEP_BYTES) if width else None
        for step in range(self.group // 8):
            packed = load(b, I32x16, values, step * STEP_BYTES)
            for half in range(2):
                low = b.and_(b.lshr(packed, constant(I32x16, 4)) if half else packed, nibble)
                yield low if high is None else b.or_(low, _fifth_and_sixth(b, high, width, 2 * step + half))

    def weight(self, b: ir.IRBuilder, values: ir.Value, i: ir.Value) -> ir.Value:
        """The ``i``th of ``weights``."""
        if self.bits == 8:
            return load(b, I32x16, offset(b, values, (i, STEP_BYTES)))
        packed = load(b, I32x16, offset(b, values, (b.lshr(i, i64(1)), STEP_BYTES)))
        half = splat(b, b.trunc(b.shl(b.and_(i, i64(1)), i64(2)), I32))
        low = b.and_(b.lshr(packed, half), constant(I32x16, 0x0F0F0F0F))
        if self.bits == 4:
            return low
        width = self.bits - 4
        high = load(b, I32x16, values, self.group // 8 * STEP_BYTES)
        field = b.lshr(high, splat(b, b.trunc(b.mul(i, i64(width)), I32)))
        return b.or_(low, b.shl(b.and_(field, constant(I32x16, _in_bytes((1 << width) - 1))), constant(I32x16, 4)))

    def start(self, b: ir.IRBuilder, term: ir.Value, dot: int) -> ir.Value:
        """Initial value of a total with a term, or of its ``dot``th part."""
        if self.parts > 1:
            return constant(I32x16, ROUNDER_BITS if self.num_dots == 1 else 0)
        return splat(b, load(b, I32, term, self.group + (OFFSET if self.num_dots == 1 else OFFSETS + 4 * dot)))

    def with_dots(
        self, b: ir.IRBuilder, g: ir.Value, which: int, totals: list[list[ir.Value]], dots: list[list[ir.Value]]
    ) -> list[list[ir.Value]]:
        """``totals`` of each token and panel with their ``which``th parts added."""
        return dots

    def products(self, b: ir.IRBuilder, term: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        """Totals, of the numbers alone, times the scale of a term: the bits of ``_products``, in fewer registers."""
        if self.parts == 1:
            start = self.start(b, term, 0)
            return _products(b, b.add(term, i64(self.group)), [b.add(total, start) for total in totals])
        x_scale = splat(b, load(b, F32, term, self.group))
        return [b.fmul(b.sitofp(total, F32x16), x_scale) for total in totals]

    def add(
        self, b: ir.IRBuilder, term: ir.Value, products: list[ir.Value], scales: list[Scales], results: list[ir.Value]
    ) -> list[ir.Value]:
        """``results`` of each panel with a term's products added, of totals and its scale."""
        for i in range(self.num_factors - 1):
            x_sum = splat(b, load(b, F32, term, self.group + (OFFSET if self.joined == 1 else OFFSETS + 4 * i)))
            results = [fma(b, minima[i], x_sum, result) for (_, minima), result in zip(scales, results, strict=True)]
        return _add_products(b, products, scales, results)


def _products(b: ir.IRBuilder, side: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
    """Totals, counted in the bits of ROUNDER, times the scale of activations; ``side`` is its address."""
    x_scale, start = (splat(b, load(b, F32, side, place)) for place in (0, START))
    return [fma(b, b.bitcast(total, F32x16), x_scale, start) for total in totals]


def _add_products(
    b: ir.IRBuilder, products: list[ir.Value], scales: list[Scales], results: list[ir.Value]
) -> list[ir.Value]:
    """``results`` of each panel with products times its scales added."""
    triples = zip(products, scales, results, strict=True)
    return [fma(b, scale, product, result) for product, (scale, _), result in triples]


def _in_bytes(value: int) -> int:
    """The same in each byte of a word."""
    return 0x01010101 * value


def _fifth_and_sixth(b: ir.IRBuilder, high: ir.Value, width: int, i: int) -> ir.Value:
    """The upper bits of the ``i``th four k, ``width`` of them, in their place: bits 4 on of each byte."""
    right = width * i - 4
    moved = b.lshr(high, constant(I32x16, right)) if right > 0 else b.shl(high, constant(I32x16, -right))
    return b.and_(moved, constant(I32x16, _in_bytes(((1 << width) - 1) << 4)))


class _Panel(_Form):
    """One packed panel: the addresses of its values and scales."""

    count = 1

    def __init__(self, form: tuple[int, int, int, int], values: ir.Value, scales: ir.Value) -> None:
        super().__init__(*form)
        self._values, self._scales, self.num_dots = values, scales, self.joined

    def steps(self, b: ir.IRBuilder, g: ir.Value) -> Iterator[list[ir.Value]]:
        """A group's weights of each panel, four k at a time."""
        return ([weights] for weights in self.weights(b, offset(b, self._values, (g, self.value_bytes))))

    def step(self, b: ir.IRBuilder, g: ir.Value, i: ir.Value) -> list[ir.Value]:
        """The ``i``th of ``steps``, times multiples if groups are joined."""
        weight = self.weight(b, offset(b, self._values, (g, self.value_bytes)), i)
        if self.joined == 1:
            return [weight]
        return [self._joined(b, weight, g, b.udiv(i, i64(JOINED_GROUP // 4)))]

    def factors(self, b: ir.IRBuilder, g: ir.Value) -> list[Scales]:
        """A group's scales and minima, of each panel."""
        scale, *minima = load_scales(b, self.scale_format, self.group, self.parts, self._scales, g)
        return [(scale, minima)]

    def multiple(self, b: ir.IRBuilder, g: ir.Value, i: ir.Value) -> ir.Value:
        """Those, int8, of the ``i``th group that is joined to group g."""
        group = joined_group(b, self.group, g, i)
        return load_multiple(b, JOINED_GROUP, self.parts, self._scales, group, 0)

    def with_dots(
        self, b: ir.IRBuilder, g: ir.Value, which: int, totals: list[list[ir.Value]], dots: list[list[ir.Value]]
    ) -> list[list[ir.Value]]:
        """See ``_Form``."""
        if self.joined == 1:
            return dots
        multiple = b.sext(self.multiple(b, g, i64(which)), I32x16)
        return [
            [add_multiple(b, *pair, multiple) for pair in zip(*each, strict=True)]
            for each in zip(totals, dots, strict=True)
        ]

    def unpacked(self, b: ir.IRBuilder, g: ir.Value) -> Iterator[ir.Value]:
        """What a pair has of a group."""
        for i, (weight,) in enumerate(self.steps(b, g)):
            yield weight if self.joined == 1 else self._joined(b, weight, g, i64(4 * i // JOINED_GROUP))
        ((scale, minima),) = self.factors(b, g)
        yield from (scale, *minima)

    def _joined(self, b: ir.IRBuilder, weight: ir.Value, g: ir.Value, i: ir.Value) -> ir.Value:
        return times_multiple(b, weight, self.multiple(b, g, i), self.parts > 1)


class _Pair(_Form):
    """Two unpacked panels in scratch memory."""

    count = 2

    def __init__(self, form: tuple[int, int, int, int], pair: ir.Value) -> None:
        super().__init__(*form)
        self.number_bits = self.bits if self.joined == 1 else 8
        self.bits, self.value_bytes, self._pair = 8, self.group * LANES, pair

    def places(self, b: ir.IRBuilder, g: ir.Value) -> list[ir.Value]:
        """Addresses of a group in each panel."""
        here = offset(b, self._pair, (g, self.pair_bytes))
        return [b.add(here, i64(at)) for at in (0, self.pair_bytes // 2)]

    def steps(self, b: ir.IRBuilder, g: ir.Value) -> Iterator[list[ir.Value]]:
        """See ``_Panel``."""
        both = (self.weights(b, place) for place in self.places(b, g))
        return (list(weights) for weights in zip(*both, strict=True))

    def step(self, b: ir.IRBuilder, g: ir.Value, i: ir.Value) -> list[ir.Value]:
        """See ``_Panel``."""
        return [self.weight(b, place, i) for place in self.places(b, g)]

    def factors(self, b: ir.IRBuilder, g: ir.Value) -> list[Scales]:
        """See ``_Panel``."""
        places = (b.add(place, i64(self.value_bytes)) for place in self.places(b, g))
        found = (load_scales(b, FLOAT32, self.group, self.num_factors, place, i64(0)) for place in places)
        return [(scale, minima) for scale, *minima in found]


def pair_bytes(bits: int, group: int, has_minima: int, scale_format: int) -> int:
    """Bytes of a group of a pair."""
    return _Form(bits, group, has_minima, scale_format).pair_bytes


@emitted()
def take_apart(
    b: ir.IRBuilder, bits: Constant, group: Constant, has_minima: Constant, scale_format: Constant, values: ir.Value,
    scales: ir.Value, out: ir.Value, num_groups: ir.Value,
) -> None:  # fmt: skip
    """Unpack a panel of ``num_groups`` groups into its half of a pair at ``out``."""
    panel = _Panel((bits, group, has_minima, scale_format), values, scales)
    with Loop(b, num_groups, []) as loop:
        place = offset(b, out, (loop.index, panel.pair_bytes))
        for i, vector in enumerate(panel.unpacked(b, loop.index)):
            store(b, vector, place, STEP_BYTES * i)


@emitted()
def block_dot(
    b: ir.IRBuilder, operand: Constant, bits: Constant, group: Constant, has_minima: Constant, scale_format: Constant,
    values: ir.Value, scales: ir.Value, ahead: ir.Value, scales_ahead: ir.Value, terms: ir.Value, out: ir.Value,
    out_stride: ir.Value, num_groups: ir.Value, num_tokens: ir.Value,
) -> None:  # fmt: skip
    """First terms: a panel or a pair times ``num_tokens`` adjacent rows of terms, one of TOKEN_COUNTS.

    A pair is at ``values``. ``out`` is float32 [tokens, 16] of the first panel; the second's is ``out_stride`` bytes
    further. A panel's values and scales are prefetched from ``ahead`` and ``scales_ahead`` on. All these are
    addresses; the first five arguments are constants.
    """
    form = bits, group, has_minima, scale_format
    packed, pair = _Panel(form, values, scales), _Pair(form, values)
    panels = pair if operand else packed
    outs = [offset(b, out, (out_stride, i)) for i in range(panels.count)]

    def ask(g: ir.Value) -> None:
        for base, num_bytes in ((ahead, packed.value_bytes), (scales_ahead, packed.scale_bytes)):
            ask_for(b, offset(b, base, (g, num_bytes)), num_bytes)

    for count in TOKEN_COUNTS[operand]:
        with b.if_then(b.icmp_signed("==", num_tokens, i64(count))):
            if count == TOKENS_TOGETHER:
                _emit_tile_dot(b, pair, terms, outs, num_groups, ask)
            else:
                _emit_block_dot(b, count, panels, terms, outs, num_groups, ask)


def _emit_block_dot(
    b: ir.IRBuilder,
    num_tokens: int,
    panels: _Panel | _Pair,
    terms: ir.Value,
    outs: list[ir.Value],
    num_groups: ir.Value,
    ask: Callable[[ir.Value], None],
) -> None:
    with Loop(b, num_groups, [constant(F32x16, 0.0)] * (num_tokens * panels.count)) as loop:
        g = loop.index
        at = offset(b, terms, (g, panels.term_bytes * TOKENS_TOGETHER))
        here = [b.add(at, i64(panels.term_bytes * token)) for token in range(num_tokens)]
        # With an address for each panel, the multiplications broadcast from memory.
        places = [at, hidden(b, at) if BROADCASTS_EACH_TIME else at][: panels.count]
        totals = [[constant(I32x16, ROUNDER_BITS) for _ in outs] for _ in here]
        steps = panels.group // 4 // panels.num_dots
        for i, weights in enumerate(panels.steps(b, g)):
            which = i // steps
            if i % steps == 0:
                starts = (panels.start(b, term, which) for term in here)
                dots = [[Dot4(b, start, panels.number_bits) for _ in outs] for start in starts]
            for token in range(num_tokens):
                xs = [splat(b, load(b, I32, place, panels.term_bytes * token + 4 * i)) for place in places]
                for dot, weight, x in zip(dots[token], weights, xs, strict=True):
                    dot.add(b, weight, x)
            if i % steps == steps - 1:
                totals = panels.with_dots(b, g, which, totals, [[dot.total(b) for dot in each] for each in dots])
        ask(g)
        scales = panels.factors(b, g)
        results = []
        for token, term in enumerate(here):
            before = loop.carried[token * panels.count : (token + 1) * panels.count]
            products = _products(b, b.add(term, i64(panels.group)), totals[token])
            results += panels.add(b, term, products, scales, before)
        loop.carried = results
    for i, result in enumerate(loop.results):
        store(b, result, outs[i % panels.count], STEP_BYTES * (i // panels.count))


def tile_bytes(group: int) -> int:
    """Bytes of a token's numbers in a tile; 0 where tiles cannot be used, here or for groups of this length."""
    if declines() is not None or missing(("amx-int8",)) is not None:
        return 0
    return next((size for size in (64, 32) if group % size == 0), 0)


def _emit_tile_dot(
    b: ir.IRBuilder,
    panels: _Pair,
    terms: ir.Value,
    outs: list[ir.Value],
    num_groups: ir.Value,
    ask: Callable[[ir.Value], None],
) -> None:
    """Like ``_emit_block_dot``, for a pair of an even number of groups and TOKENS_TOGETHER tokens.

    Groups take turns with two tiles of totals for each panel. While a group is multiplied, the totals of the one
    before are written to memory, and those of the one before that are added to the results.
    """
    panel_bytes, last = TOKENS_TOGETHER * STEP_BYTES, b.sub(num_groups, i64(1))
    room = alloca_once(b, ir.ArrayType(F32x16, 2 * panels.count * TOKENS_TOGETHER))
    rooms = [offset(b, b.ptrtoint(room, I64), (i64(panels.count), turn * panel_bytes)) for turn in range(2)]

    def advance(g: ir.Value, turn: int) -> None:
        """Multiply group g, and write the other turn's totals."""
        g = b.select(b.icmp_signed("<", g, last), g, last)
        at = offset(b, terms, (g, panels.term_bytes * TOKENS_TOGETHER))
        steps = range(0, panels.group, tile_bytes(panels.group))
        for first in steps:
            tile_load(b, X_TILE + turn, b.add(at, i64(first)), panels.term_bytes)
            for i, place in enumerate(panels.places(b, g)):
                tile_load(b, WEIGHT_TILE + i, b.add(place, i64(first * LANES)), STEP_BYTES)
                if first == steps[0]:
                    tile_call(b, "tilezero", 2 * turn + i)
                tile_call(b, "tdpbsud", 2 * turn + i, X_TILE + turn, WEIGHT_TILE + i)
                if first == steps[-1]:
                    tile_store(b, 2 * (1 - turn) + i, b.add(rooms[1 - turn], i64(panel_bytes * i)), STEP_BYTES)

    advance(i64(0), 0)
    advance(i64(1), 1)
    with Loop(b, b.lshr(num_groups, i64(1)), [constant(F32x16, 0.0)] * (TOKENS_TOGETHER * panels.count)) as loop:
        for turn in range(2):
            g = b.add(b.shl(loop.index, i64(1)), i64(turn))
            advance(b.add(g, i64(2)), turn)
            ask(g)
            scales, results = panels.factors(b, g), []
            for token in range(TOKENS_TOGETHER):
                term = offset(b, terms, (g, panels.term_bytes * TOKENS_TOGETHER), (i64(token), panels.term_bytes))
                places = (panel_bytes * i + STEP_BYTES * token for i in range(panels.count))
                products = panels.products(b, term, [load(b, I32x16, rooms[turn], place) for place in places])
                before = loop.carried[token * panels.count : (token + 1) * panels.count]
                # In another order sums would leave the registers.
                results += [settled(b, result) for result in panels.add(b, term, products, scales, before)]
            loop.carried = results
    for i, result in enumerate(loop.results):
        store(b, result, outs[i % panels.count], STEP_BYTES * (i // panels.count))


@emitted()
def add_large_parts(
    b: ir.IRBuilder, operand: Constant, bits: Constant, group: Constant, has_minima: Constant, scale_format: Constant,
    values: ir.Value, scales: ir.Value, out: ir.Value, out_stride: ir.Value, num_tokens: ir.Value, parts: ir.Value,
    row_bytes: ir.Value, counts: ir.Value,
) -> None:  # fmt: skip
    """Add the products of large parts with a panel or a pair to the results of ``block_dot`` for all tokens.

    A token's parts are adjacent, ``row_bytes`` behind the previous token's; ``counts`` int32 [num_tokens] of them.
    """
    form = bits, group, has_minima, scale_format
    panels = _Pair(form, values) if operand else _Panel(form, values, scales)
    with Loop(b, num_tokens, []) as tokens:
        token = tokens.index
        count, first = b.sext(load(b, I32, offset(b, counts, (token, 4))), I64), b.mul(token, row_bytes)
        places = [offset(b, out, (token, STEP_BYTES), (out_stride, i)) for i in range(panels.count)]
        with Loop(b, count, [load(b, F32x16, place) for place in places]) as loop:
            part = offset(b, b.add(parts, first), (loop.index, 4 * PART_WORDS))
            x, start, g, i = (load(b, I32, part, 4 * word) for word in (0, 3, 4, 5))
            weights = panels.step(b, b.sext(g, I64), b.sext(i, I64))
            dots = [Dot4(b, splat(b, start), panels.number_bits if panels.joined == 1 else 8) for _ in weights]
            for dot, weight in zip(dots, weights, strict=True):
                dot.add(b, weight, splat(b, x))
            factors = panels.factors(b, b.sext(g, I64))
            products = _products(b, b.add(part, i64(4)), [dot.total(b) for dot in dots])
            loop.carried = _add_products(b, products, factors, loop.carried)
        for result, place in zip(loop.results, places, strict=True):
            store(b, result, place)
