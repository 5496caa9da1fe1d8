"""The recurrence of ops with state, one row after the other: ``S = decay S + k u^T; out = S^T q``.

Columns of a head's state do not depend on each other, so threads take blocks of them, ``WIDTH`` columns each: one block
stays in the first-level cache while all rows of a sequence pass. Every sum over the numbers of a key has four partial
sums, of every fourth number, which are added in a fixed order. A row's bits hence depend neither on the rows that are
computed with it, nor on the block.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from octavo.ops.recurrent.recurrence import StateRows
from octavo_kernels.cpu.compiled import Constant, compiled_task, emitted, inlined
from octavo_kernels.cpu.half import narrow, rounded, widen
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.tensors import address
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import (
    F32,
    FLOAT32,
    FORMAT_BYTES,
    HAS_AVX512,
    LANES,
    F32x16,
    Loop,
    ask_for,
    constant,
    exp,
    fma,
    i64,
    load,
    offset,
    sigmoid,
    softplus,
    splat,
    store,
)

VECTORS = 2 if HAS_AVX512 else 1
"""Vectors of a block's columns: with so many the partial sums fit the registers."""
WIDTH = VECTORS * LANES
CHAINS = 4
"""Partial sums of each column."""
MULTIPLICATIONS_A_PIECE = 50_000
PLAIN, DELTA, DELTA_BY_CHANNEL = range(3)
"""Rules: u = v, or the delta rule, with one decay for all numbers of a key or one for each."""

STATE = (
    "starts lengths slots marks S T num_slots state recur N K V q k key_stride share v value_stride decay beta skip out"
)
"""Fields with which the arguments of an op with state begin: addresses of a step's starts, lengths, slots and marks (or
0), of int32, and their sizes; the state [slots, N, K, V]; the task of ``recur_all``; sizes; float32 addresses of
queries and keys, whose rows are ``key_stride`` bytes apart, and each head of which is used by ``share`` neighbouring
heads; of values; of decays [T, N], or [T, N, K]; of factors of the values [T, N], or 0; of factors of the values that
are added to the outputs [N], or 0; of the outputs [T, N, V]."""
RECURRENCE = fields(STATE)


def state_arguments(rows: StateRows, num_rows: int, state: Tensor) -> tuple[int, ...]:
    """The first values of STATE; raises ``ValueError`` where tensors cannot be passed by their addresses."""
    marks = rows.marks_T
    for x in (*rows[:3], *([] if marks is None else [marks[:num_rows]])):
        if not x.is_contiguous() or x.dtype != torch.int32:
            raise ValueError("recurrent state: starts, lengths, slots and marks must be contiguous, of int32")
    if marks is not None and len(marks) < num_rows:
        raise ValueError(f"recurrent state: {len(marks)} marks for {num_rows} rows")
    if not state.is_contiguous():
        raise ValueError("recurrent state: the slots must be contiguous")
    addresses = rows.cu_seqlens_q.data_ptr(), rows.seq_lens_S.data_ptr(), rows.slots_S.data_ptr()
    return *addresses, address(marks), len(rows.slots_S), num_rows, len(state), state.data_ptr()


def rows_of(x_TC: Tensor) -> Tensor:
    """``x`` with neighbouring columns: itself where it is some of the columns of a wider tensor."""
    return x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()


@inlined
def fits(a: Any) -> bool:
    """Whether the step's rows and slots stay within its tensors."""
    starts, slots = view(a.starts, a.S + 1, np.int32), view(a.slots, a.S, np.int32)
    if starts[0] != 0 or starts[a.S] > a.T:
        return False
    is_right = True
    for s in range(a.S):
        is_right &= starts[s + 1] >= starts[s] and slots[s] < a.num_slots
    if a.marks:
        for mark in view(a.marks, a.T, np.int32):
            is_right &= mark < a.num_slots
    return is_right


@inlined
def recur_all(pool: int, arguments: int) -> None:
    """Compute all rows of a step; see STATE."""
    a = read(arguments, RECURRENCE)
    items = a.S * a.N * ((a.V + WIDTH - 1) // WIDTH)
    work = 2 * a.T * a.N * a.K * a.V
    run(pool, a.recur, arguments, items, max(1, items * MULTIPLICATIONS_A_PIECE // max(1, work)))


@emitted()
def _advance(
    b: ir.IRBuilder, number_format: Constant, rule: Constant, steps: ir.Value, block: ir.Value, stride: ir.Value,
    decay: ir.Value, key: ir.Value, decayed_key: ir.Value, query: ir.Value, value: ir.Value, beta: ir.Value,
    out: ir.Value, ahead: ir.Value,
) -> None:  # fmt: skip
    """One row: the next state of a block, rounded to a number format, and WIDTH outputs.

    The block has a row of WIDTH float32 for each of CHAINS * ``steps`` numbers of the key, ``stride`` bytes apart.
    As many bytes are prefetched meanwhile from ``ahead`` on, unless it is 0.
    All but the first three are addresses of float32, or that stride; the first two are constants. ``decay`` has one
    factor, unless the rule is DELTA_BY_CHANNEL.
    """
    columns = _Block(b, rule, steps, block, stride, ahead)
    single = None if rule == DELTA_BY_CHANNEL else splat(b, load(b, F32, decay))
    values = [load(b, F32x16, value, 4 * LANES * w) for w in range(VECTORS)]
    if rule != PLAIN:
        known = columns.products(decayed_key)
        if single is not None:
            known = [b.fmul(single, x) for x in known]
        values = [b.fsub(v, x) for v, x in zip(values, known, strict=True)]
    factor = splat(b, load(b, F32, beta))
    values = [b.fmul(factor, v) for v in values]
    for w, total in enumerate(columns.update(number_format, single, decay, key, values, query)):
        store(b, total, out, 4 * LANES * w)


class _Block:
    """The columns of a state that are computed together."""

    def __init__(
        self, b: ir.IRBuilder, rule: int, steps: ir.Value, at: ir.Value, stride: ir.Value, ahead: ir.Value
    ) -> None:
        self._b, self._steps, self._at, self._stride, self._ahead = b, steps, at, stride, ahead
        self._bytes_ahead = 4 * WIDTH * CHAINS // (1 if rule == PLAIN else 2)
        self._zeros = [constant(F32x16, 0.0)] * (CHAINS * VECTORS)

    def _number(self, loop: Loop, chain: int, address: ir.Value) -> ir.Value:
        """The number of the key's vector at ``address`` that belongs to this row."""
        b = self._b
        return splat(b, load(b, F32, offset(b, address, (loop.index, 4 * CHAINS)), 4 * chain))

    def _places(self, loop: Loop, chain: int) -> list[ir.Value]:
        b = self._b
        row = b.add(b.mul(loop.index, i64(CHAINS)), i64(chain))
        first = b.add(self._at, b.mul(row, self._stride))
        return [b.add(first, i64(4 * LANES * w)) for w in range(VECTORS)]

    def _ask(self, loop: Loop, first: int) -> None:
        """Prefetch a step's part of what comes next."""
        b = self._b
        with b.if_then(b.icmp_signed("!=", self._ahead, i64(0))):
            step = b.add(b.mul(i64(first), self._steps), loop.index)
            ask_for(b, offset(b, self._ahead, (step, self._bytes_ahead)), self._bytes_ahead)

    def products(self, key: ir.Value) -> list[ir.Value]:
        """S^T k"""
        b = self._b
        with Loop(b, self._steps, self._zeros) as loop:
            sums = []
            for chain in range(CHAINS):
                k = self._number(loop, chain, key)
                for w, place in enumerate(self._places(loop, chain)):
                    sums.append(fma(b, k, load(b, F32x16, place), loop.carried[chain * VECTORS + w]))
            self._ask(loop, 0)
            loop.carried = sums
        return self._totals(loop.results)

    def update(
        self,
        number_format: int,
        single: ir.Value | None,
        decay: ir.Value,
        key: ir.Value,
        values: list[ir.Value],
        query: ir.Value,
    ) -> list[ir.Value]:
        """Write decay * S + key values^T, rounded; its product with the query."""
        b = self._b
        with Loop(b, self._steps, self._zeros) as loop:
            sums = []
            for chain in range(CHAINS):
                factor = self._number(loop, chain, decay) if single is None else single
                k, q = (self._number(loop, chain, address) for address in (key, query))
                for w, place in enumerate(self._places(loop, chain)):
                    x = rounded(b, number_format, fma(b, k, values[w], b.fmul(factor, load(b, F32x16, place))))
                    store(b, x, place)
                    sums.append(fma(b, q, x, loop.carried[chain * VECTORS + w]))
            self._ask(loop, 1 if self._bytes_ahead < 4 * WIDTH * CHAINS else 0)
            loop.carried = sums
        return self._totals(loop.results)

    def _totals(self, sums: list[ir.Value]) -> list[ir.Value]:
        """The sum of the chains of each vector."""
        b = self._b
        first, second, third, fourth = (sums[chain * VECTORS : (chain + 1) * VECTORS] for chain in range(CHAINS))
        pairs = [[b.fadd(x, y) for x, y in zip(*pair, strict=True)] for pair in ((first, second), (third, fourth))]
        return [b.fadd(x, y) for x, y in zip(*pairs, strict=True)]


@inlined
def copy(source: int, out: int, count: int) -> None:
    x, y = view(source, count, np.float32), view(out, count, np.float32)
    for i in range(count):
        y[i] = x[i]


@inlined
def _multiply_into(x_at: int, y_at: int, out: int, count: int) -> None:
    x, y, product = view(x_at, count, np.float32), view(y_at, count, np.float32), view(out, count, np.float32)
    for i in range(count):
        product[i] = x[i] * y[i]


@inlined
def _add(factor: Any, source: int, out: int, count: int) -> None:
    x, y = view(source, count, np.float32), view(out, count, np.float32)
    for i in range(count):
        y[i] += factor * x[i]


@inlined
def _padded(address: int, count: int, out: Any) -> int:
    """The address of a key's numbers: itself if their count is a multiple of CHAINS, else that of a copy."""
    if count == len(out):
        return address
    copy(address, out.ctypes.data, count)
    return out.ctypes.data  # type: ignore[no-any-return]


@inlined
def _place(a: Any, number_format: Constant, slot: int, n: int, column: int) -> int:
    """The address of a column of a head's state."""
    item = FORMAT_BYTES[number_format]
    return a.state + item * ((slot * a.N + n) * a.K * a.V + column)  # type: ignore[no-any-return]


@inlined
def move(a: Any, number_format: Constant, at: int, block: Any, columns: int, is_stored: bool) -> None:
    """Load a block's columns from the state, or store them there."""
    item = FORMAT_BYTES[number_format]
    for i in range(a.K):
        place, row = at + item * i * a.V, block[i].ctypes.data
        if is_stored:
            narrow(number_format, row, place, columns)
        else:
            widen(number_format, place, row, columns)


@inlined
def _compute_rows(
    a: Any, number_format: Constant, rule: Constant, s: int, n: int, column: int, block: int, stride: int, ahead: int,
    own: Any, room: Any,
) -> None:  # fmt: skip
    """All rows of a sequence, for a block of columns of one head, which is ``own`` if the step has marks; ``room`` is
    scratch, the last row ones."""
    columns, steps, size = min(WIDTH, a.V - column), (a.K + CHAINS - 1) // CHAINS, 4 * a.K
    starts, value, result = view(a.starts, a.S + 1, np.int32), room[3].ctypes.data, room[4].ctypes.data
    length, is_padded = CHAINS * steps, columns < WIDTH
    for t in range(starts[s], starts[s + 1]):
        index = t * a.N + n
        at = t * a.key_stride + n // a.share * size
        key, query = _padded(a.k + at, a.K, room[0, :length]), _padded(a.q + at, a.K, room[1, :length])
        decay, decayed_key = a.decay + 4 * index, key
        if rule == DELTA_BY_CHANNEL:
            decay = _padded(a.decay + size * index, a.K, room[2, :length])
            decayed_key = room[5].ctypes.data
            _multiply_into(key, decay, decayed_key, length)
        beta = a.beta + 4 * index if a.beta else room[6].ctypes.data
        source, out = a.v + t * a.value_stride + 4 * (n * a.V + column), a.out + 4 * (index * a.V + column)
        if is_padded:
            copy(source, value, columns)
        if not is_padded:
            value, result = source, out
        _advance(number_format, rule, steps, block, stride, decay, key, decayed_key, query, value, beta, result, ahead)
        if is_padded:
            copy(result, out, columns)
        if a.skip:
            _add(view(a.skip, a.N, np.float32)[n], source, out, columns)
        if a.marks:
            mark = view(a.marks, a.T, np.int32)[t]
            if mark >= 0:
                move(a, number_format, _place(a, number_format, mark, n, column), own, columns, True)


@functools.cache
def recur_task(number_format: int, rule: int) -> int:
    """Task over sequences, heads and blocks of columns, for ``recur_all``; the state has a number format."""
    item, is_exact = FORMAT_BYTES[number_format], number_format == FLOAT32

    def recur(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, RECURRENCE)
        starts, lengths = view(a.starts, a.S + 1, np.int32), view(a.lengths, a.S, np.int32)
        slots, blocks = view(a.slots, a.S, np.int32), (a.V + WIDTH - 1) // WIDTH
        num_rows = (a.K + CHAINS - 1) // CHAINS * CHAINS
        own, room = np.zeros((num_rows, WIDTH), np.float32), np.zeros((7, max(WIDTH, num_rows)), np.float32)
        room[6] = 1
        for index in range(begin, end):
            s, n, column = index // (a.N * blocks), index // blocks % a.N, index % blocks * WIDTH
            count, slot = starts[s + 1] - starts[s], slots[s]
            if count <= 0 or slot < 0:
                continue
            columns, is_fresh = min(WIDTH, a.V - column), lengths[s] == count
            at = _place(a, number_format, slot, n, column)
            is_copied = not is_exact or is_fresh or count > 1 or columns < WIDTH or num_rows != a.K or a.marks != 0
            block, stride, ahead, later = at, 4 * a.V, 0, (index + blocks) // (a.N * blocks)
            if count == 1 and later < a.S:  # a part of the next head, line after line
                part = item * a.K * a.V // blocks
                ahead = a.state + ((slots[later] * a.N + (n + 1) % a.N) * blocks + index % blocks) * part
            if is_copied:
                block, stride = own.ctypes.data, 4 * WIDTH
                own[:] = 0
            if is_copied and not is_fresh:
                move(a, number_format, at, own, columns, False)
            _compute_rows(a, number_format, rule, s, n, column, block, stride, ahead, own, room)
            if is_copied:
                move(a, number_format, at, own, columns, True)
        keep((own, room))

    return compiled_task(recur)


@emitted()
def _decays(
    b: ir.IRBuilder, dt: ir.Value, bias: ir.Value, rates: ir.Value, limits: ir.Value, num_vectors: ir.Value,
    steps: ir.Value, decays: ir.Value,
) -> None:  # fmt: skip
    """Time steps and decays, ``e ** (rate * step)``, of ``num_vectors`` vectors; the others are addresses."""
    low, high = (splat(b, load(b, F32, limits, at)) for at in (0, 4))
    with Loop(b, num_vectors, []) as loop:
        at = b.mul(loop.index, i64(4 * LANES))
        step = softplus(b, b.fadd(load(b, F32x16, b.add(dt, at)), load(b, F32x16, b.add(bias, at))))
        step = b.select(b.fcmp_ordered("<", step, low), low, step)
        step = b.select(b.fcmp_ordered(">", step, high), high, step)
        store(b, step, b.add(steps, at))
        store(b, exp(b, b.fmul(load(b, F32x16, b.add(rates, at)), step)), b.add(decays, at))


@emitted()
def _bounded_decays(
    b: ir.IRBuilder, dt: ir.Value, bias: ir.Value, rates: ir.Value, limits: ir.Value, num_vectors: ir.Value,
    decays: ir.Value,
) -> None:  # fmt: skip
    """Decays ``e ** (lowest * sigmoid(-rate * (dt + bias)))`` of ``num_vectors`` vectors; ``limits`` begins with the
    lowest exponent."""
    lowest = splat(b, load(b, F32, limits, 0))
    with Loop(b, num_vectors, []) as loop:
        at = b.mul(loop.index, i64(4 * LANES))
        x = b.fadd(load(b, F32x16, b.add(dt, at)), load(b, F32x16, b.add(bias, at)))
        share = sigmoid(b, b.fneg(b.fmul(load(b, F32x16, b.add(rates, at)), x)))
        store(b, exp(b, b.fmul(lowest, share)), b.add(decays, at))


@inlined
def decay_row(dt_at: int, bias: Any, a_log: Any, limits: Any, padded: Any, steps: Any, decays: Any) -> None:
    """Write the time steps and decays of one row, whose every len(bias) / len(a_log) numbers have one rate.

    Where the first of ``limits`` is below zero, that is the lowest exponent of decays, and there are no time steps.
    ``padded`` is scratch, float32 [5, len(bias) rounded up to 16].
    """
    count, of_head = len(bias), len(bias) // len(a_log)
    dt = view(dt_at, count, np.float32)
    for n in range(len(a_log)):
        padded[2, n * of_head : (n + 1) * of_head] = -np.exp(a_log[n])
    for i in range(count):
        padded[0, i], padded[1, i] = dt[i], bias[i]
    at = [padded[row].ctypes.data for row in range(5)]
    if limits[0] < 0:
        _bounded_decays(at[0], at[1], at[2], limits.ctypes.data, (count + LANES - 1) // LANES, at[4])
    else:
        _decays(at[0], at[1], at[2], limits.ctypes.data, (count + LANES - 1) // LANES, at[3], at[4])
    for i in range(count):
        steps[i], decays[i] = padded[3, i], padded[4, i]
