"""The recurrence of long sequences in chunks of C rows, as matrix products: what the recurrent kernel gives, but for
rounding (arXiv 2405.21060, section 6; arXiv 2412.06464, section 3.3).

With ``G`` the sums of a chunk's exponents of decay, ``D[i, j] = e^(G[i] - G[j])`` for ``i >= j``, and S the state
before the chunk::

    A = strict lower part of (beta K K^T * D);  U = (I + A)^-1 beta V;  W = (I + A)^-1 (beta e^G K)    delta rule
    U = step V                                                                                         other rules
    U' = U - W S;  out = (e^G Q) S + (Q K^T * D) U';  S = e^G[C-1] S + (e^(G[C-1] - G) K)^T U'

Three launches: U and W of all chunks at once; the states, one chunk of a sequence after the other, which also makes U'
of U; the outputs of all chunks at once. Products are of numbers of the inputs' type, summed in float32; L2 norms,
decays and beta multiply sums, or factors just before they are rounded. Where each number of a key has a decay of its
own (arXiv 2510.26692), D is part of the products, which a kernel of their own makes. The chunks of a sequence begin
with its first row of the step, so that its bits depend on where a prompt is cut: ``--batch-invariant`` keeps to the
recurrent kernel.

Shapes: T tokens, S sequences, N heads, K numbers of a key, V of a value, C rows of a chunk, B numbers of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.recurrent.recurrence import StateRows
from octavo_kernels.triton.launch import after_predecessor, launch, shared_bytes
from octavo_kernels.triton.recurrent.rules import (
    DELTA,
    DELTA_BY_CHANNEL,
    EPS,
    Inputs,
    channel_exponents,
    load_row,
    normed,
    rate_and_bias,
    step_and_exponent,
)

CHUNK = 64
CHUNK_ROWS = tl.constexpr(CHUNK)
LEAST = 64
"""Fewest numbers of keys and of values that a program takes: with fewer, products of 16-bit numbers, as Triton 3.6
makes them, read beyond the shared memory that they have."""
INNER = 16
"""Rows of the diagonal blocks of A that are inverted together."""
KEYS = 64
"""Numbers of keys that a program multiplies at a time."""
CHANNELS = 32
"""The same where each has a decay of its own."""
COLUMNS = 32
"""Of a head's state, in the launch in which chunks follow each other: few, so that there are many programs."""
MAX_STAGES, KEPT_BYTES = 3, 24 * 1024
"""Most chunks there whose operands are loaded ahead, and shared memory that is left for what is not."""


@triton.jit
def places_before(
    s_S: tl.tensor, starts_ptr: tl.tensor, slots_ptr: tl.tensor, S: tl.tensor, few: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Which sequences are computed in chunks, and the place of the first chunk of each, given all s.

    Chunk i of the l-th of them has place ``starts[s] // C + l + i``, which is another for each chunk.
    """
    is_seq = s_S < S
    first_S = tl.load(starts_ptr + s_S, mask=is_seq, other=0)
    end_S, slot_S = tl.load(starts_ptr + s_S + 1, mask=is_seq, other=0), tl.load(slots_ptr + s_S, mask=is_seq, other=-1)
    is_long_S = (end_S - first_S > few) & (slot_S >= 0)
    return is_long_S, first_S // CHUNK_ROWS + tl.cumsum(is_long_S.to(tl.int32), 0) - 1


@triton.jit
def chunk_of(
    place: tl.tensor, starts_ptr: tl.tensor, slots_ptr: tl.tensor, S: tl.tensor, few: tl.tensor,
    SEQUENCES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The first row of the chunk in a place, and how many rows it has: none in places without a chunk."""
    s_S = tl.arange(0, SEQUENCES)
    is_long_S, bases_S = places_before(s_S, starts_ptr, slots_ptr, S, few)
    s = tl.max(tl.where(is_long_S & (bases_S <= place), s_S, -1), 0)
    base = tl.sum(tl.where(s_S == s, bases_S, 0), 0)
    row, end = tl.load(starts_ptr + tl.maximum(s, 0)) + (place - base) * CHUNK_ROWS, tl.load(starts_ptr + s + 1)
    return row, tl.where(s >= 0, tl.minimum(end - row, CHUNK_ROWS), 0)


@triton.jit
def load_tile(
    ptrs: tl.tensor, x_B: tl.tensor, is_row_C: tl.tensor, SIZE: tl.constexpr, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """Numbers ``x`` of some rows, [C, B]; zeros outside of them."""
    tile = tl.load(ptrs[:, None] + x_B[None, :], mask=is_row_C[:, None] & (x_B < SIZE)[None, :], other=0.0)
    if ACTIVATION == "silu":
        wide = tile.to(tl.float32)
        tile = (wide * tl.sigmoid(wide)).to(tile.dtype)
    return tile


@triton.jit
def _below(A: tl.tensor, r: tl.tensor, c: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Blocks of SIZE x SIZE next to the diagonal: of every second row of blocks."""
    return tl.where((r // SIZE % 2 == 1) & (c // SIZE == r // SIZE - 1), A, 0.0)


@triton.jit
def inverse(A: tl.tensor, C: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """``(I + A)^-1`` of A [C, C], whose numbers on and above the diagonal are 0.

    Where X inverts the diagonal blocks of some size and O is what is left of A in blocks twice as large, ``X - X O X``
    inverts those. Powers of A would grow beyond all bounds where keys repeat.
    """
    BLOCKS: tl.constexpr = C // INNER
    b, r, c = tl.arange(0, BLOCKS), tl.arange(0, INNER), tl.arange(0, INNER)
    is_own = (b[:, None] == b[None, :])[:, None, :, None]
    small = tl.sum(tl.where(is_own, tl.reshape(A, (BLOCKS, INNER, BLOCKS, INNER)), 0.0), 2)
    r, c = r[None, :, None], c[None, None, :]
    X = tl.where(r == c, 1.0, 0.0) - _below(small, r, c, 1)
    for level in tl.static_range(1, 4):
        left = tl.dot(_below(small, r, c, 2**level), X, input_precision=PRECISION)
        X -= tl.dot(X, left, input_precision=PRECISION)
    X = tl.reshape(tl.where(is_own, X[:, :, None, :], 0.0), (C, C))
    r, c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for level in tl.static_range(4, 6):
        left = tl.dot(_below(A, r, c, 2**level), X, input_precision=PRECISION)
        X -= tl.dot(X, left, input_precision=PRECISION)
    return X


@triton.jit(do_not_specialize=["S"])
def chunk_inputs_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, row_stride: tl.tensor, dt_ptr: tl.tensor, dt_stride: tl.tensor,
    beta_ptr: tl.tensor, beta_stride: tl.tensor, a_log_ptr: tl.tensor, bias_ptr: tl.tensor, factor_ptr: tl.tensor,
    u_ptr: tl.tensor, w_ptr: tl.tensor, sums_ptr: tl.tensor, scales_ptr: tl.tensor, starts_ptr: tl.tensor,
    slots_ptr: tl.tensor, S: tl.tensor, few: tl.tensor, beta_scale: tl.tensor, low: tl.tensor, high: tl.tensor,
    RULE: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, SEQUENCES: tl.constexpr, C: tl.constexpr,
    INNER: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """``U`` [T, N, V] of one chunk of one head, the sums G [T, N] of its exponents; of the delta rule also ``W``
    [T, N, K], and the factors [T, N] that make keys unit vectors."""
    n = tl.program_id(0)
    after_predecessor(PDL)
    row, count = chunk_of(tl.program_id(1), starts_ptr, slots_ptr, S, few, SEQUENCES)
    if count > 0:
        i_C, x_B, head = tl.arange(0, C), tl.arange(0, B), n // SHARE
        is_row = i_C < count
        t = row.to(tl.int64) + tl.minimum(i_C, count - 1)
        if RULE == 3:
            exponent = tl.log(tl.load(factor_ptr + n)) + tl.zeros((C,), tl.float32)
        else:
            rate, bias = rate_and_bias(a_log_ptr, bias_ptr, n, x_B, x_B < K, RULE, K)
            dt = dt_ptr + t * dt_stride
            step, exponent = step_and_exponent(dt, bias, rate, n, x_B, x_B < K, low, high, RULE, K, 0.0)
        sums = tl.cumsum(tl.where(is_row, exponent, 0.0), 0)
        tl.store(sums_ptr + t * N + n, sums, mask=is_row)
        v_ptrs, u_ptrs = v_ptr + t * row_stride + n * V, u_ptr + (t * N + n) * V
        if RULE == 0:
            products, squares = tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
            k_ptrs = k_ptr + t * row_stride + head * K
            for at in tl.static_range(0, K_BLOCK, B):
                k = load_tile(k_ptrs, at + x_B, is_row, K, ACTIVATION)
                products = tl.dot(k, tl.trans(k), products, input_precision=PRECISION)
                squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
            scales = tl.rsqrt(squares + EPS)
            tl.store(scales_ptr + t * N + n, scales, mask=is_row)
            beta = beta_scale * tl.sigmoid(tl.load(beta_ptr + t * beta_stride + n).to(tl.float32))
            is_before = (i_C[:, None] > i_C[None, :]) & is_row[:, None]
            decay = tl.exp(tl.where(is_before, sums[:, None] - sums[None, :], 0.0))
            A = tl.where(is_before, products * decay * (beta * scales)[:, None] * scales[None, :], 0.0)
            X = inverse(A, C, INNER, PRECISION)
            of_v = (X * beta[None, :]).to(u_ptr.dtype.element_ty)
            of_k = (X * (beta * scales * tl.exp(sums))[None, :]).to(u_ptr.dtype.element_ty)
            for at in tl.static_range(0, V_BLOCK, B):
                v = load_tile(v_ptrs, at + x_B, is_row, V, ACTIVATION)
                u = tl.dot(of_v, v, input_precision=PRECISION).to(u_ptr.dtype.element_ty)
                tl.store(u_ptrs[:, None] + (at + x_B)[None, :], u, mask=is_row[:, None] & (at + x_B < V)[None, :])
            w_ptrs = w_ptr + (t * N + n) * K
            for at in tl.static_range(0, K_BLOCK, B):
                k = load_tile(k_ptrs, at + x_B, is_row, K, ACTIVATION)
                w = tl.dot(of_k, k, input_precision=PRECISION).to(w_ptr.dtype.element_ty)
                tl.store(w_ptrs[:, None] + (at + x_B)[None, :], w, mask=is_row[:, None] & (at + x_B < K)[None, :])
        else:
            for at in tl.static_range(0, V_BLOCK, B):
                u = load_tile(v_ptrs, at + x_B, is_row, V, ACTIVATION)
                if RULE == 2:
                    u = (u.to(tl.float32) * step[:, None]).to(u_ptr.dtype.element_ty)
                tl.store(u_ptrs[:, None] + (at + x_B)[None, :], u, mask=is_row[:, None] & (at + x_B < V)[None, :])


@triton.jit
def channel_sums(
    dt_ptrs: tl.tensor, bias_ptr: tl.tensor, rate: tl.tensor, k_B: tl.tensor, is_row_C: tl.tensor, K: tl.constexpr,
    LOWEST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums G [C, B] of the exponents of some numbers of a key."""
    is_in = is_row_C[:, None] & (k_B < K)[None, :]
    x = load_row(dt_ptrs[:, None] + k_B[None, :], is_in, None) + load_row(bias_ptr + k_B, k_B < K, None)
    return tl.cumsum(tl.where(is_in, channel_exponents(x, rate, LOWEST), 0.0), 0)


@triton.jit
def decayed_products(
    x: tl.tensor, k: tl.tensor, sums: tl.tensor, C: tl.constexpr, INNER: tl.constexpr, B: tl.constexpr,
    PRECISION: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """``sum over b of x[i, b] k[j, b] e^(G[i, b] - G[j, b])`` [C, C] for ``j <= i``; x and k are float32 [C, B].

    No exponent is above 0: between blocks of INNER rows both factors are relative to the first row of the later block,
    within a block each column is computed by itself.
    """
    BLOCKS: tl.constexpr = C // INNER
    i_C = tl.arange(0, C)
    products = tl.zeros((C, C), tl.float32)
    for block in range(1, BLOCKS):
        base = tl.sum(tl.where((i_C == block * INNER)[:, None], sums, 0.0), 0)[None, :]
        left = tl.where((i_C // INNER == block)[:, None], x * tl.exp(tl.minimum(sums - base, 0.0)), 0.0)
        right = tl.where((i_C // INNER < block)[:, None], k * tl.exp(tl.minimum(base - sums, 0.0)), 0.0)
        products = tl.dot(left, tl.trans(right), products, input_precision=PRECISION)
    rows = tl.arange(0, INNER)
    x, k = tl.reshape(x, (BLOCKS, INNER, B)), tl.reshape(k, (BLOCKS, INNER, B))
    sums = tl.reshape(sums, (BLOCKS, INNER, B))
    small = tl.zeros((BLOCKS, INNER, INNER), tl.float32)
    for j in range(INNER):
        is_own = (rows == j)[None, :, None]
        of_k = tl.sum(tl.where(is_own, k, 0.0), 1)[:, None, :]
        decay = tl.exp(tl.minimum(sums - tl.sum(tl.where(is_own, sums, 0.0), 1)[:, None, :], 0.0))
        small = tl.where((rows == j)[None, None, :], tl.sum(x * of_k * decay, 2)[:, :, None], small)
    is_own = (tl.arange(0, BLOCKS)[:, None] == tl.arange(0, BLOCKS)[None, :])[:, None, :, None]
    return products + tl.reshape(tl.where(is_own, small[:, :, None, :], 0.0), (C, C))


@triton.jit(do_not_specialize=["S"])
def chunk_channel_inputs_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, row_stride: tl.tensor, dt_ptr: tl.tensor,
    dt_stride: tl.tensor, beta_ptr: tl.tensor, beta_stride: tl.tensor, a_log_ptr: tl.tensor, bias_ptr: tl.tensor,
    u_ptr: tl.tensor, w_ptr: tl.tensor, queries_ptr: tl.tensor, keys_ptr: tl.tensor, products_ptr: tl.tensor,
    totals_ptr: tl.tensor, scales_ptr: tl.tensor, starts_ptr: tl.tensor, slots_ptr: tl.tensor, S: tl.tensor,
    few: tl.tensor, beta_scale: tl.tensor, ACTIVATION: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, B: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    INNER: tl.constexpr, SEQUENCES: tl.constexpr, PRECISION: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """What ``chunk_inputs_kernel`` makes, of the delta rule with a decay for each number of a key: ``e^G Q`` and
    ``e^(G[C-1] - G) K`` [T, N, K], their products [T, N, C], and the sums G[C-1] [places, N, K] in addition."""
    n, place = tl.program_id(0), tl.program_id(1)
    after_predecessor(PDL)
    row, count = chunk_of(place, starts_ptr, slots_ptr, S, few, SEQUENCES)
    if count > 0:
        i_C, x_B, head = tl.arange(0, C), tl.arange(0, B), n // SHARE
        is_row = i_C < count
        dtype: tl.constexpr = u_ptr.dtype.element_ty
        t = row.to(tl.int64) + tl.minimum(i_C, count - 1)
        rate = -tl.exp(tl.load(a_log_ptr + n))
        A, P = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        squares_q, squares_k = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
        at_keys = (t * N + n) * K
        for at in range(0, K_BLOCK, B):
            k_B = at + x_B
            is_in = is_row[:, None] & (k_B < K)[None, :]
            q = load_tile(q_ptr + t * row_stride + head * K, k_B, is_row, K, ACTIVATION).to(tl.float32)
            k = load_tile(k_ptr + t * row_stride + head * K, k_B, is_row, K, ACTIVATION).to(tl.float32)
            sums = channel_sums(dt_ptr + t * dt_stride + n * K, bias_ptr + n * K, rate, k_B, is_row, K, LOWEST)
            total = tl.sum(tl.where((i_C == C - 1)[:, None], sums, 0.0), 0)
            tl.store(totals_ptr + (place.to(tl.int64) * N + n) * K + k_B, total, mask=k_B < K)
            ptrs = at_keys[:, None] + k_B[None, :]
            tl.store(keys_ptr + ptrs, (k * tl.exp(total[None, :] - sums)).to(dtype), mask=is_in)
            A += decayed_products(k, k, sums, C, INNER, B, PRECISION)
            P += decayed_products(q, k, sums, C, INNER, B, PRECISION)
            squares_q += tl.sum(q * q, 1)
            squares_k += tl.sum(k * k, 1)
        scales, scales_q = tl.rsqrt(squares_k + EPS), tl.rsqrt(squares_q + EPS) * (K**-0.5)
        tl.store(scales_ptr + t * N + n, scales, mask=is_row)
        is_known = (i_C[:, None] >= i_C[None, :]) & is_row[:, None]
        P = tl.where(is_known, P * scales[None, :], 0.0) * scales_q[:, None]
        tl.store(products_ptr + ((t * N + n) * C)[:, None] + i_C[None, :], P.to(dtype), mask=is_row[:, None])
        beta = beta_scale * tl.sigmoid(tl.load(beta_ptr + t * beta_stride + n).to(tl.float32))
        is_before = is_known & (i_C[:, None] > i_C[None, :])
        X = inverse(tl.where(is_before, A * (beta * scales)[:, None] * scales[None, :], 0.0), C, INNER, PRECISION)
        of_v, of_k = (X * beta[None, :]).to(dtype), (X * (beta * scales)[None, :]).to(dtype)
        for at in range(0, V_BLOCK, B):
            v = load_tile(v_ptr + t * row_stride + n * V, at + x_B, is_row, V, ACTIVATION)
            u = tl.dot(of_v, v, input_precision=PRECISION).to(dtype)
            ptrs = ((t * N + n) * V)[:, None] + (at + x_B)[None, :]
            tl.store(u_ptr + ptrs, u, mask=is_row[:, None] & (at + x_B < V)[None, :])
        for at in range(0, K_BLOCK, B):
            k_B = at + x_B
            k = load_tile(k_ptr + t * row_stride + head * K, k_B, is_row, K, ACTIVATION).to(tl.float32)
            sums = channel_sums(dt_ptr + t * dt_stride + n * K, bias_ptr + n * K, rate, k_B, is_row, K, LOWEST)
            w = tl.dot(of_k, (k * tl.exp(sums)).to(dtype), input_precision=PRECISION).to(dtype)
            tl.store(w_ptr + at_keys[:, None] + k_B[None, :], w, mask=is_row[:, None] & (k_B < K)[None, :])
            q = load_tile(q_ptr + t * row_stride + head * K, k_B, is_row, K, ACTIVATION).to(tl.float32)
            q = (q * tl.exp(sums) * scales_q[:, None]).to(dtype)
            tl.store(queries_ptr + at_keys[:, None] + k_B[None, :], q, mask=is_row[:, None] & (k_B < K)[None, :])


@triton.jit(do_not_specialize=["S"])
def chunk_states_kernel(
    k_ptr: tl.tensor, row_stride: tl.tensor, u_ptr: tl.tensor, w_ptr: tl.tensor, sums_ptr: tl.tensor,
    scales_ptr: tl.tensor, before_ptr: tl.tensor, state_ptr: tl.tensor, starts_ptr: tl.tensor, lengths_ptr: tl.tensor,
    slots_ptr: tl.tensor, S: tl.tensor, few: tl.tensor, ACTIVATION: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, C: tl.constexpr,
    IS_BY_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, SEQUENCES: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The chunks of one sequence, for V_BLOCK columns of one head: the state before each of them [places, N, K, V], and
    the one behind the last, in the sequence's slot. ``U`` becomes ``U'``."""
    n, s = tl.program_id(0), tl.program_id(1)
    k_K, v_B, i_C = tl.arange(0, K_BLOCK), tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK), tl.arange(0, C)
    after_predecessor(PDL)
    first, end, slot = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1), tl.load(slots_ptr + s)
    if (end - first > few) & (slot >= 0):
        dtype: tl.constexpr = u_ptr.dtype.element_ty
        has_past = tl.load(lengths_ptr + s) > end - first
        at_KB = k_K[:, None] * V + v_B[None, :]
        is_in = (k_K < K)[:, None] & (v_B < V)[None, :]
        own = state_ptr + (slot.to(tl.int64) * N + n) * K * V + at_KB
        state_KB = tl.load(own, mask=is_in & has_past, other=0.0).to(tl.float32)
        s_S = tl.arange(0, SEQUENCES)
        _, bases_S = places_before(s_S, starts_ptr, slots_ptr, S, few)
        place, row = tl.sum(tl.where(s_S == s, bases_S, 0), 0).to(tl.int64), first.to(tl.int64)
        for _ in tl.range(first, end, C, num_stages=STAGES):
            tl.store(before_ptr + (place * N + n) * K * V + at_KB, state_KB.to(dtype), mask=is_in)
            is_row, t = i_C < end - row, row + i_C
            if IS_BY_CHANNEL:  # keys are decayed already
                decay = tl.exp(tl.load(sums_ptr + (place * N + n) * K + k_K, mask=k_K < K, other=0.0))[:, None]
                factor = tl.where(is_row, 1.0, 0.0)
            else:
                sums = tl.load(sums_ptr + t * N + n, mask=is_row, other=0.0)
                total = tl.load(sums_ptr + (tl.minimum(row + C, end) - 1) * N + n)
                decay, factor = tl.exp(total), tl.where(is_row, tl.exp(total - sums), 0.0)
            u_ptrs = u_ptr + (t * N + n) * V
            u = load_tile(u_ptrs, v_B, is_row, V, None)
            if w_ptr is not None:
                w = load_tile(w_ptr + (t * N + n) * K, k_K, is_row, K, None)
                u = u.to(tl.float32) - tl.dot(w, state_KB.to(dtype), input_precision=PRECISION)
                tl.store(u_ptrs[:, None] + v_B[None, :], u.to(dtype), mask=is_row[:, None] & (v_B < V)[None, :])
                factor *= tl.load(scales_ptr + t * N + n, mask=is_row, other=0.0)
            k = load_tile(k_ptr + t * row_stride + n // SHARE * K, k_K, is_row, K, ACTIVATION)
            added = (u.to(tl.float32) * factor[:, None]).to(dtype)
            state_KB = tl.dot(tl.trans(k), added, state_KB * decay, input_precision=PRECISION)
            place += 1
            row += C
        tl.store(own, state_KB.to(state_ptr.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["S"])
def chunk_outputs_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, row_stride: tl.tensor, gate_ptr: tl.tensor,
    gate_stride: tl.tensor, factor_ptr: tl.tensor, u_ptr: tl.tensor, sums_ptr: tl.tensor, scales_ptr: tl.tensor,
    before_ptr: tl.tensor, out_ptr: tl.tensor, starts_ptr: tl.tensor, slots_ptr: tl.tensor, S: tl.tensor,
    few: tl.tensor, eps: tl.tensor, RULE: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, N: tl.constexpr,
    SHARE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, SEQUENCES: tl.constexpr, C: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Outputs of one chunk of one head. With a decay for each number of a key, q and k are the queries and products of
    ``chunk_channel_inputs_kernel``."""
    n, place = tl.program_id(0), tl.program_id(1)
    after_predecessor(PDL)
    row, count = chunk_of(place, starts_ptr, slots_ptr, S, few, SEQUENCES)
    if count > 0:
        i_C, x_B, v_V, head = tl.arange(0, C), tl.arange(0, B), tl.arange(0, V_BLOCK), n // SHARE
        is_row, is_value, t = i_C < count, v_V < V, row.to(tl.int64) + i_C
        out, products = tl.zeros((C, V_BLOCK), tl.float32), tl.zeros((C, C), tl.float32)
        squares = tl.zeros((C,), tl.float32)
        before = before_ptr + (place.to(tl.int64) * N + n) * K * V
        for at in tl.static_range(0, K_BLOCK, B):
            q = load_tile(q_ptr + t * row_stride + head * K, at + x_B, is_row, K, ACTIVATION)
            state = load_tile(before + (at + x_B) * V, v_V, at + x_B < K, V, None)
            out = tl.dot(q, state, out, input_precision=PRECISION)
            if RULE != 1:
                k = load_tile(k_ptr + t * row_stride + head * K, at + x_B, is_row, K, ACTIVATION)
                products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)
            if RULE == 0:
                squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        u = load_tile(u_ptr + (t * N + n) * V, v_V, is_row, V, None)
        if RULE == 1:  # queries and products are decayed and scaled already
            products = load_tile(k_ptr + (t * N + n) * C, i_C, is_row, C, None)
        else:
            sums = tl.load(sums_ptr + t * N + n, mask=is_row, other=0.0)
            is_known = (i_C[:, None] >= i_C[None, :]) & is_row[:, None]
            products *= tl.exp(tl.where(is_known, sums[:, None] - sums[None, :], 0.0))
            if RULE == 0:
                products *= tl.load(scales_ptr + t * N + n, mask=is_row, other=0.0)[None, :]
            products = tl.where(is_known, products, 0.0).to(u_ptr.dtype.element_ty)
            out *= tl.exp(sums)[:, None]
        out = tl.dot(products, u, out, input_precision=PRECISION)
        if RULE <= 1:
            if RULE == 0:
                out *= (tl.rsqrt(squares + EPS) * (K**-0.5))[:, None]
            norm = load_row(factor_ptr + v_V, is_value, None)[None, :]
            is_in = is_row[:, None] & is_value[None, :]
            gates = load_row(gate_ptr + (t * gate_stride)[:, None] + (n * V + v_V)[None, :], is_in, None)
            out = normed(out, gates, norm, eps, V, GATE)
        if RULE == 2:
            v = load_tile(v_ptr + t * row_stride + n * V, v_V, is_row, V, ACTIVATION)
            out += tl.load(factor_ptr + n) * v.to(tl.float32)
        own = t * N + n % TILE * (N // TILE) + n // TILE
        ptrs = out_ptr + (own * V)[:, None] + v_V[None, :]
        tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_value[None, :])


def can_chunk(inputs: Inputs, K: int, V: int) -> bool:
    """Whether the operands fit a program."""
    return max(K, V) * inputs.parts[0].dtype.itemsize <= 512


def recur_chunks(inputs: Inputs, state: Tensor, rows: StateRows, out: Tensor, few: int) -> None:
    """Compute the sequences that have more than ``few`` rows of the step, and only those."""
    (N, K, V), S, T = state.shape[1:], len(rows.slots_S), len(out)
    q, k, v = inputs.parts
    dtype, device, is_by_channel = q.dtype, q.device, inputs.rule == DELTA_BY_CHANNEL
    is_delta = is_by_channel or inputs.rule == DELTA
    u, w = (torch.empty((T, N, size), dtype=dtype, device=device) for size in (V, K if is_delta else 0))
    sums, scales = torch.empty((2, T, N), dtype=torch.float32, device=device)
    places = T // CHUNK + min(S, T // (few + 1))
    before = torch.empty((places, N, K, V), dtype=dtype, device=device)
    of_delta = (w, scales) if is_delta else (None, None)
    strides, starts, slots = inputs.strides(), rows.cu_seqlens_q, rows.slots_S
    key_block, width = (max(LEAST, triton.next_power_of_2(size)) for size in (K, V))
    columns = min(width, COLUMNS)
    staged = CHUNK * (2 * key_block + columns) * dtype.itemsize
    precision = "tf32x3" if dtype == torch.float32 else "tf32"
    # fmt: off
    options = {
        "N": N, "SHARE": inputs.share, "K": K, "V": V, "K_BLOCK": key_block, "C": CHUNK, "PRECISION": precision,
        "SEQUENCES": triton.next_power_of_2(S), "ACTIVATION": inputs.activation,
    }
    if is_by_channel:
        made = [torch.empty((T, N, size), dtype=dtype, device=device) for size in (K, K, CHUNK)]
        sums = torch.empty((places, N, K), dtype=torch.float32, device=device)
        launch(
            chunk_channel_inputs_kernel, (N, places), q, k, v, k.stride(0), inputs.dt, strides[0], inputs.beta,
            strides[1], inputs.a_log, inputs.bias, u, w, *made, sums, scales, starts, slots, S, few, inputs.beta_scale,
            V_BLOCK=width, INNER=INNER, B=CHANNELS, LOWEST=inputs.lowest, **options, num_warps=8,
        )
        q, k = made[0], made[1]
        options |= {"SHARE": 1, "ACTIVATION": None}
    else:
        launch(
            chunk_inputs_kernel, (N, places), k, v, k.stride(0), inputs.dt, strides[0], inputs.beta, strides[1],
            inputs.a_log, inputs.bias, inputs.factor, u, of_delta[0], sums, of_delta[1], starts, slots, S, few,
            inputs.beta_scale, *inputs.limits, RULE=inputs.rule, V_BLOCK=width, INNER=INNER, B=KEYS, **options,
            num_warps=4,
        )
    launch(
        chunk_states_kernel, (N, S, triton.cdiv(V, columns)), k, k.stride(0), u, of_delta[0], sums, of_delta[1], before,
        state, starts, rows.seq_lens_S, slots, S, few, V_BLOCK=columns, IS_BY_CHANNEL=is_by_channel, **options,
        STAGES=min(MAX_STAGES, max(1, (shared_bytes(device) - KEPT_BYTES) // staged)), num_warps=4,
    )
    launch(
        chunk_outputs_kernel, (N, places), q, made[2] if is_by_channel else k, v, q.stride(0), inputs.gate, strides[2],
        inputs.factor, u, sums, of_delta[1], before, out, starts, slots, S, few, inputs.eps, RULE=inputs.rule,
        GATE=inputs.gate_kind, TILE=inputs.tile, V_BLOCK=width, B=KEYS, **options,
        num_warps=8 if width >= 128 else 4,
    )
    # fmt: on
