"""Rows of INT8 and INT4 in a kernel: made of keys and values, and loaded. They are those of
``ops.attention.cached_rows``, to the bit.

Products with keys of 8 bits are multiplied by the keys' scales, and weights of values by those of values. Rows of 4
bits become numbers in registers; they are rotated, and so are the queries that they meet, and results are turned back.
16-bit queries become bfloat16, which has all codes and the range of rotated numbers.

Shapes: T tokens, N heads, K kv heads, H head dim, D: H filled up to a power of two, C rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import HeadLayout, LayerCache
from octavo.ops.attention.cached_rows import GROUP, STORED, VECTOR, rotated_together
from octavo_kernels.triton.attention.decode_qkv import load_angles, load_heads, load_norm, turned
from octavo_kernels.triton.grouped.grouped_numbers import entry_of_uint4, int8_of_two, pairs_of_e4m3
from octavo_kernels.triton.launch import after_predecessor, has_assembly, launch

ROWS = 4
"""Of a program, which makes one head of each. Fixed, so that a row does not depend on the number of rows."""
_GROUP = tl.constexpr(GROUP)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a number of float32 below 2^22 and subtracted again, it leaves the nearest integer, of two the even one."""


def is_packed(cache: Tensor) -> bool:
    """Whether a cache holds rows of 8 or 4 bits."""
    return cache.dtype in STORED.values()


def run_of(cache: Tensor, head_dim: int) -> int:
    """How many neighbouring numbers of the cache's rows are rotated with each other, 1 for none; 0 for a cache of a
    floating-point type."""
    if cache.dtype != torch.uint8:
        return int(is_packed(cache))
    assert head_dim % VECTOR == 0, f"rows of INT4 need a head_dim that {VECTOR} divides, not {head_dim}"
    return rotated_together(head_dim)


def least_width(cache: Tensor) -> int:
    """Columns at least of a kernel's tile: a dot takes 16 numbers, and INT4's is made of groups."""
    return GROUP if cache.dtype == torch.uint8 else VECTOR


def planes_of(cache: Tensor) -> int:
    """How many numbers of a row are in a word of 16 bits: in so many ``planes`` a kernel takes them."""
    return {torch.float8_e4m3fn: 2, torch.int8: 2, torch.uint8: 4}.get(cache.dtype, 1)


def row_assembly(cache: Tensor, queries: torch.dtype) -> tuple[str, ...] | None:
    """PTX for ``planes``, where it can be used and queries have 16 bits, and there are planes."""
    if queries == torch.float32 or planes_of(cache) == 1 or not has_assembly(cache.device):
        return None
    if cache.dtype == torch.float8_e4m3fn:
        return (pairs_of_e4m3(),)
    of_plane = int8_of_two if cache.dtype == torch.int8 else entry_of_uint4
    return tuple(of_plane(plane) for plane in range(planes_of(cache)))


def pack_store(
    qkv_TW: Tensor,
    heads: HeadLayout,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    cache: LayerCache,
    slot_mapping_T: Tensor,
) -> Tensor:
    """``rotate_store`` for a cache of packed rows; the queries [T, N, H] are float32 or bfloat16."""
    T, N, K, H = qkv_TW.shape[0], heads.num_heads, heads.num_kv_heads, heads.head_dim
    keys, values = cache.keys, cache.values
    assert qkv_TW.stride(1) == 1, "the columns of a row must lie side by side"
    assert keys.stride() == values.stride(), "keys and values must be laid out alike"
    dtype = torch.float32 if qkv_TW.dtype == torch.float32 else torch.bfloat16
    q_TNH = torch.empty((T, N, H), dtype=dtype, device=qkv_TW.device)
    launch(
        _pack_store_kernel, (triton.cdiv(T, ROWS), N if heads.shares_cache else N + 2 * K), qkv_TW, q_TNH, keys, values,
        slot_mapping_T, cos_TR, sin_TR, heads.q_norm_H, heads.k_norm_H, T, qkv_TW.stride(0),
        0 if cos_TR is None else cos_TR.stride(0), keys.stride(0), heads.norm_eps, HEAD_STRIDE=keys.stride(1),
        SLOT_STRIDE=keys.stride(2), BLOCK_SIZE=keys.shape[2], N=N, K=K, H=H, R=0 if cos_TR is None else cos_TR.shape[1],
        D=max(least_width(keys), triton.next_power_of_2(H)), RUN=run_of(keys, H), ROWS=ROWS, num_warps=1,
    )  # fmt: skip
    return q_TNH


@triton.jit(do_not_specialize=["T"])
def _pack_store_kernel(
    qkv: tl.tensor, queries: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, slots: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor, T: tl.tensor, row_stride: tl.tensor, angle_stride: tl.tensor,
    block_stride: tl.tensor, eps: tl.tensor, HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    RUN: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1)
    t, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    is_row, d_RD = (t < T)[:, None], tl.broadcast_to(d[None, :], [ROWS, D])
    after_predecessor(PDL)
    start = qkv + t[:, None] * row_stride + head * H
    if head < N:
        angles = load_angles(cos, sin, t[:, None] * angle_stride, is_row, d_RD, R)
        weights = load_norm(q_norm, d_RD, H, R)
        q = turned(load_heads(start, is_row, d_RD, H, R), q_norm, weights, angles, eps, H, 1)
        to = queries + (t[:, None] * N + head) * H + d
        tl.store(to, rotated(q, RUN).to(queries.dtype.element_ty), mask=is_row & (d < H))
    else:
        slot = tl.load(slots + t, mask=t < T, other=-1)
        kv_head = head - N
        cache = k_cache
        if kv_head < K:
            angles = load_angles(cos, sin, t[:, None] * angle_stride, is_row, d_RD, R)
            weights = load_norm(k_norm, d_RD, H, R)
            x = turned(load_heads(start, is_row, d_RD, H, R), k_norm, weights, angles, eps, H, 1)
        else:
            x = tl.load(start + d, mask=is_row & (d < H), other=0.0).to(tl.float32)
            kv_head -= K
            cache = v_cache
        at = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * SLOT_STRIDE + kv_head * HEAD_STRIDE
        if cache.dtype.element_ty == tl.int8:
            _store_8_bits(cache, at, x, slot >= 0, H)
        else:
            _store_4_bits(cache, at, rotated(x, RUN), slot >= 0, H)


@triton.jit
def _store_8_bits(cache: tl.tensor, at: tl.tensor, x: tl.tensor, is_stored: tl.tensor, H: tl.constexpr) -> None:
    """Rows of numbers [rows, D] from these bytes of the cache on."""
    W: tl.constexpr = (H + 15) // 16 * 16
    d = tl.arange(0, x.shape[1])
    largest = tl.max(tl.abs(x), 1) + tl.sum(x * 0, 1)  # NaN if a number is not finite
    scale = tl.div_rn(largest, tl.full([x.shape[0]], 127.0, tl.float32))
    tl.store(cache.to(tl.pointer_type(tl.float32), bitcast=True) + at // 4, scale, mask=is_stored)
    codes = tl.minimum(tl.maximum(_codes(x, scale[:, None]), -127.0), 127.0)
    tl.store(cache + at[:, None] + 4 + d, codes.to(tl.int8), mask=is_stored[:, None] & (d < W))


@triton.jit
def _store_4_bits(cache: tl.tensor, at: tl.tensor, x: tl.tensor, is_stored: tl.tensor, H: tl.constexpr) -> None:
    """Rows of rotated numbers [rows, D] from these bytes of the cache on."""
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = D // _GROUP
    NUM_GROUPS: tl.constexpr = (H + _GROUP - 1) // _GROUP
    is_number = tl.reshape(tl.arange(0, D) < H, [1, GROUPS, _GROUP])
    groups = tl.reshape(x, [M, GROUPS, _GROUP])
    spoiled = tl.sum(groups * 0, 2)  # NaN if a number is not finite
    least = tl.min(tl.where(is_number, groups, float("inf")), 2) + spoiled
    most = tl.max(tl.where(is_number, groups, float("-inf")), 2) + spoiled
    least = _cut(least, least < 0)
    span = tl.div_rn(most - least, tl.full([M, GROUPS], 15.0, tl.float32))
    scale = _cut(span, span > 0)
    header = (scale.to(tl.int32, bitcast=True) & -0x10000) | ((least.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
    g = tl.arange(0, GROUPS)
    headers = cache.to(tl.pointer_type(tl.int32), bitcast=True) + (at // 4)[:, None] + g
    tl.store(headers, header, mask=is_stored[:, None] & (g < NUM_GROUPS))
    codes = tl.minimum(tl.maximum(_codes(groups - least[:, :, None], scale[:, :, None]), 0.0), 15.0).to(tl.int32)
    first, second = tl.split(tl.reshape(codes, [M, D // 2, 2]))
    b = tl.arange(0, D // 2)
    pairs = cache + at[:, None] + 4 * NUM_GROUPS + b
    tl.store(pairs, (first | (second << 4)).to(tl.uint8), mask=is_stored[:, None] & (b < H // 2))


@triton.jit
def _codes(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The nearest integers to numbers by their scales, as float32; 0 where the scale is none."""
    is_scale = (scale > 0) & (scale < float("inf"))
    quotient = tl.div_rn(x, tl.broadcast_to(tl.where(is_scale, scale, 1.0), x.shape))
    return tl.where(is_scale, (quotient + _TO_INTEGER) - _TO_INTEGER, 0.0)


@triton.jit
def _cut(x: tl.tensor, grows: tl.tensor) -> tl.tensor:
    """As ``ops.attention.cached_rows`` has it."""
    bits = ((x + 0.0).to(tl.int32, bitcast=True) + tl.where(grows, 0xFFFF, 0)) & -0x10000
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def rotated(x: tl.tensor, RUN: tl.constexpr) -> tl.tensor:
    """``rotated`` of rows [rows, D], in runs of RUN numbers: as in ``ops.attention.cached_rows``, a power of two after
    the other.

    Each round takes the lowest bit of a number's place and puts it on top.
    """
    COUNT: tl.constexpr = x.shape[0] * x.shape[1] // RUN
    y = tl.reshape(x, [COUNT, RUN])
    ROUNDS: tl.constexpr = RUN.bit_length() - 1
    for _ in tl.static_range(ROUNDS):
        first, second = tl.split(tl.reshape(y, [COUNT, RUN // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(first + second, first - second), 0, 2, 1), [COUNT, RUN])
    return tl.reshape(y, x.shape)


@triton.jit
def turned_back(x: tl.tensor, RUN: tl.constexpr) -> tl.tensor:
    """Numbers that have been ``rotated``, if their cache's are."""
    if RUN > 1:
        x = rotated(x, RUN) * (1 / RUN)
    return x


@triton.jit
def load_rows(
    cache: tl.tensor, slots: tl.tensor, is_row: tl.tensor, STRIDE: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    RUN: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows [C, D] that lie at ``slots`` [C, 1], STRIDE items each, from ``cache`` on, which is one place or that of
    each row; and by what products with them are to be multiplied, [1, C] or 1.0. 0 for those that are none.

    They are as in the cache if it is of a floating-point type (``RUN`` is 0), else bfloat16 by ASSEMBLY, or float32.
    """
    d, unit = tl.arange(0, D), 1.0
    if RUN == 0:
        rows = tl.load(cache + (slots * STRIDE + d), mask=is_row & (d < H), other=0.0)
    elif cache.dtype.element_ty == tl.int8:
        unit = tl.trans(tl.load(_as(cache, tl.float32) + slots * (STRIDE // 4), mask=is_row, other=0.0))
        codes = tl.load(cache + (slots * STRIDE + 4 + d), mask=is_row & (d < H), other=0)
        rows = codes.to(tl.float32 if ASSEMBLY is None else tl.bfloat16)
    else:
        words, header = load_words(cache, slots, is_row, STRIDE, H, D, RUN, 4)
        numbers = planes(words, header, RUN, 4, tl.float32 if ASSEMBLY is None else tl.bfloat16, ASSEMBLY)
        rows = of_planes(numbers)
    return rows, unit


@triton.jit
def load_words(
    cache: tl.tensor, slots: tl.tensor, is_row: tl.tensor, STRIDE: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    RUN: tl.constexpr, PLANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows as ``load_rows`` has them, in words of PLANES numbers [C, D / PLANES], or as they are where that is one; and
    their headers: of INT8 scales [1, C], of INT4 those of groups [C, D / 32]."""
    w, header = tl.arange(0, D // PLANES), 1.0
    if PLANES == 1:
        words = tl.load(cache + (slots * STRIDE + w), mask=is_row & (w < H), other=0.0)
    elif RUN == 0:
        words = tl.load(_as(cache, tl.int16) + (slots * (STRIDE // 2) + w), mask=is_row & (w < H // 2), other=0)
    elif RUN == 1:
        header = tl.trans(tl.load(_as(cache, tl.float32) + slots * (STRIDE // 4), mask=is_row, other=0.0))
        words = tl.load(_as(cache, tl.int16) + (slots * (STRIDE // 2) + 2 + w), mask=is_row & (w < H // 2), other=0)
    else:
        NUM_GROUPS: tl.constexpr = (H + _GROUP - 1) // _GROUP
        g = tl.arange(0, D // _GROUP)
        at = slots * (STRIDE // 4) + g
        header = tl.load(_as(cache, tl.int32) + at, mask=is_row & (g < NUM_GROUPS), other=0)
        at = slots * (STRIDE // 2) + 2 * NUM_GROUPS + w
        words = tl.load(_as(cache, tl.int16) + at, mask=is_row & (w < H // 4), other=0)
    return words, header


@triton.jit
def planes(
    words: tl.tensor, header: tl.tensor, RUN: tl.constexpr, PLANES: tl.constexpr, TYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The numbers of ``load_words`` in TYPE: PLANES tensors of the words' shape, each with one number of every word."""
    if PLANES == 1:
        numbers: tl.tensor = (words.to(TYPE),)
    elif RUN == 0 and ASSEMBLY is not None:
        numbers = tl.inline_asm_elementwise(
            ASSEMBLY[0], "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif RUN <= 1:
        numbers = (_of_8_bits(words, RUN, 0, TYPE, ASSEMBLY), _of_8_bits(words, RUN, 1, TYPE, ASSEMBLY))
    else:
        numbers = _of_4_bits(words, header, TYPE, ASSEMBLY)
    return numbers


@triton.jit
def of_planes(numbers: tl.tensor) -> tl.tensor:
    """Rows [R, D] of the planes [R, D / PLANES] of their numbers."""
    if len(numbers) == 1:
        rows = numbers[0]
    else:
        if len(numbers) == 2:
            pairs = tl.join(numbers[0], numbers[1])
        else:
            pairs = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
        rows = tl.reshape(pairs, [numbers[0].shape[0], len(numbers) * numbers[0].shape[1]])
    return rows


@triton.jit
def words_of(x: tl.tensor, PLANES: tl.constexpr) -> tl.tensor:
    """Numbers [.., D] of a cache's floating-point type as ``load_words`` has them."""
    if PLANES == 2:
        pairs = tl.reshape(x, x.shape[:-1] + (x.shape[-1] // 2, 2))  # noqa: RUF005  # Triton unpacks no tuples
        first, second = tl.split(pairs.to(tl.uint8, bitcast=True).to(tl.int16))
        x = first | (second << 8)
    return x


@triton.jit
def as_words(cache: tl.tensor, PLANES: tl.constexpr) -> tl.tensor:
    if PLANES > 1:
        cache = _as(cache, tl.int16)
    return cache


@triton.jit
def _as(place: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    return place.to(tl.pointer_type(TYPE), bitcast=True)


@triton.jit
def _of_8_bits(
    words: tl.tensor, RUN: tl.constexpr, PLANE: tl.constexpr, TYPE: tl.constexpr, ASSEMBLY: tl.constexpr
) -> tl.tensor:
    """One number of each word: of INT8, or where ``RUN`` is 0 of E4M3."""
    if ASSEMBLY is not None:
        x = tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [words], dtype=TYPE.value, is_pure=True, pack=2)
    else:
        codes = (words >> (8 * PLANE)).to(tl.int8)
        if RUN == 0:
            codes = codes.to(tl.float8e4nv, bitcast=True)
        x = codes.to(tl.float32).to(TYPE)
    return x


@triton.jit
def _of_4_bits(words: tl.tensor, header: tl.tensor, TYPE: tl.constexpr, ASSEMBLY: tl.constexpr) -> tl.tensor:
    """The four numbers of each word [.., D / 4], with the headers of groups [.., D / 32]."""
    scale, least = (header & -0x10000).to(tl.float32, bitcast=True), (header << 16).to(tl.float32, bitcast=True)
    if ASSEMBLY is not None:
        scale, least = scale.to(TYPE), least.to(TYPE)
    scale, least = _of_groups(scale, words), _of_groups(least, words)
    numbers: tl.tensor = ()
    for plane in tl.static_range(4):
        numbers += (_of_nibbles(words, scale, least, plane, TYPE, ASSEMBLY),)
    return numbers


@triton.jit
def _of_groups(x: tl.tensor, words: tl.tensor) -> tl.tensor:
    """What a group's words share, [.., D / 32], for each of them."""
    each = tl.zeros([words.shape[-1] // x.shape[-1]], x.dtype)
    return tl.reshape(tl.broadcast(tl.expand_dims(x, -1), each)[0], words.shape)


@triton.jit
def _of_nibbles(
    words: tl.tensor, scale: tl.tensor, least: tl.tensor, PLANE: tl.constexpr, TYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One number of each word."""
    if ASSEMBLY is not None:
        operands = [words, scale, least]
        x = tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r,r,r", operands, dtype=TYPE.value, is_pure=True, pack=2)
    else:
        x = (((words >> (4 * PLANE)) & 15).to(tl.float32) * scale + least).to(TYPE)
    return x
