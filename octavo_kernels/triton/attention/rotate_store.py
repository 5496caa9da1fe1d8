"""Rotation of queries and keys, and the storing of keys and values in the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import (
    HeadLayout,
    KVScales,
    LayerCache,
    RopeSet,
    apply_rope,
    axis_angles,
    rotary_angles,
    store_keys,
    store_kv,
)
from octavo_kernels.triton.attention.cached_rows import is_packed, pack_store
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

# ---- rotate_store: Between a layer's projection and its attention: norm and rotate queries and keys, store keys and
# values in the cache. A program takes some rows of a few heads, all of them query, key or value heads, so that angles
# are loaded once for several heads. The two elements of a rotated pair are loaded as two tiles. Shapes: T tokens, N
# heads, K kv heads, H head dim, W = (N + 2 K) H, R rotated pairs; a program's rows M, heads G and pairs P.


ROWS = 4
HEADS = 8
"""Heads of a program. Fixed, so that a row's sums do not depend on the number of rows."""
WIDE = 256
"""Of heads wider than this, a program takes one."""


def rotate_store(
    qkv_TW: Tensor,
    heads: HeadLayout,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """Queries as attention takes them, a new tensor [T, N, H]; keys and values go to their slots.

    Where another layer has stored keys and values, rows end with their queries.

    As ``ops.rms_norm``, ``ops.apply_rope`` and ``ops.store_kv`` together, in float32 in between. Nothing is stored for
    rows of a negative slot. Numbers that a float8 cache cannot hold become the nearest that it can.
    """
    T, N, K, H = qkv_TW.shape[0], heads.num_heads, heads.num_kv_heads, heads.head_dim
    assert qkv_TW.stride(1) == 1, "the columns of a row must lie side by side"
    pairs, at_once = H // 2 if cos_TR is None else cos_TR.shape[1], HEADS if H <= WIDE else 1
    parts = 0 if heads.shares_cache else 2
    assert k_cache.stride()[2:] == v_cache.stride()[2:] == (H, 1), "the slots of a block must lie side by side"
    q_TNH = torch.empty((T, N, H), dtype=qkv_TW.dtype, device=qkv_TW.device)
    # fmt: off
    launch(
        _rotate_store_kernel, (triton.cdiv(T, ROWS), triton.cdiv(N, at_once) + parts * triton.cdiv(K, at_once)),
        qkv_TW, q_TNH, k_cache, v_cache, slot_mapping_T, cos_TR, sin_TR, heads.q_norm_H, heads.k_norm_H,
        *(scales or (None, None)), T, qkv_TW.stride(0), 0 if cos_TR is None else cos_TR.stride(0),
        *k_cache.stride()[:2], *v_cache.stride()[:2], heads.norm_eps,
        N=N, K=K, H=H, PAIRS=pairs, PAIR_BLOCK=triton.next_power_of_2(pairs),
        REST_BLOCK=triton.next_power_of_2(H - 2 * pairs) if 2 * pairs < H else 0, HEAD_BLOCK=triton.next_power_of_2(H),
        BLOCK_SIZE=k_cache.shape[2], ROWS=ROWS, HEADS=at_once, num_warps=4,
    )
    # fmt: on
    return q_TNH


@triton.jit(do_not_specialize=["T"])
def _rotate_store_kernel(
    qkv_ptr: tl.tensor, q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, slots_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, q_norm_ptr: tl.tensor, k_norm_ptr: tl.tensor, k_scale_ptr: tl.tensor, v_scale_ptr: tl.tensor,
    T: tl.tensor, row_stride: tl.tensor, angle_stride: tl.tensor, k_block_stride: tl.tensor, k_head_stride: tl.tensor,
    v_block_stride: tl.tensor, v_head_stride: tl.tensor, eps: tl.tensor, N: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    QUERY_GROUPS: tl.constexpr = (N + HEADS - 1) // HEADS
    KEY_GROUPS: tl.constexpr = (K + HEADS - 1) // HEADS
    group = tl.program_id(1)
    t_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    after_predecessor(PDL)
    is_row_M = t_M < T
    slot_M = tl.load(slots_ptr + t_M, mask=is_row_M, other=-1)
    block_M, offset_M = slot_M // BLOCK_SIZE, slot_M % BLOCK_SIZE
    row_ptrs = qkv_ptr + (t_M.to(tl.int64) * row_stride)[:, None, None]
    if group < QUERY_GROUPS:
        head_G = group * HEADS + tl.arange(0, HEADS)
        is_in_MG = is_row_M[:, None] & (head_G < N)[None, :]
        to_query_MG = q_ptr + (t_M.to(tl.int64) * N)[:, None] * H + head_G[None, :] * H
        # fmt: off
        rotate_heads(row_ptrs + head_G[None, :, None] * H, to_query_MG, is_in_MG, is_in_MG, t_M, is_row_M, q_norm_ptr,
                     None, cos_ptr, sin_ptr, angle_stride, eps, H, PAIRS, PAIR_BLOCK, REST_BLOCK)
        # fmt: on
    elif group < QUERY_GROUPS + KEY_GROUPS:
        head_G = (group - QUERY_GROUPS) * HEADS + tl.arange(0, HEADS)
        is_in_MG = is_row_M[:, None] & (head_G < K)[None, :]
        to_key_MG = k_ptr + (block_M * k_block_stride + offset_M * H)[:, None] + head_G[None, :] * k_head_stride
        is_to_MG = is_in_MG & (slot_M >= 0)[:, None]
        unit_G = None
        if k_scale_ptr is not None:
            unit_G = 1 / tl.load(k_scale_ptr + head_G, mask=head_G < K, other=1.0)
        # fmt: off
        rotate_heads(row_ptrs + (N + head_G)[None, :, None] * H, to_key_MG, is_in_MG, is_to_MG, t_M, is_row_M,
                     k_norm_ptr, unit_G, cos_ptr, sin_ptr, angle_stride, eps, H, PAIRS, PAIR_BLOCK, REST_BLOCK)
        # fmt: on
    else:
        head_G = (group - QUERY_GROUPS - KEY_GROUPS) * HEADS + tl.arange(0, HEADS)
        h_H = tl.arange(0, HEAD_BLOCK)
        is_in = ((slot_M >= 0)[:, None] & (head_G < K)[None, :])[:, :, None] & (h_H < H)[None, None, :]
        values = tl.load(row_ptrs + (N + K + head_G)[None, :, None] * H + h_H[None, None, :], mask=is_in, other=0.0)
        if v_scale_ptr is not None:
            v_unit_G = 1 / tl.load(v_scale_ptr + head_G, mask=head_G < K, other=1.0)
            values = values.to(tl.float32) * v_unit_G[None, :, None]
        to_value_MG = v_ptr + (block_M * v_block_stride + offset_M * H)[:, None] + head_G[None, :] * v_head_stride
        tl.store(to_value_MG[:, :, None] + h_H[None, None, :], values.to(v_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def rotate_heads(
    from_MG1: tl.tensor, to_MG: tl.tensor, is_in_MG: tl.tensor, is_to_MG: tl.tensor, t_M: tl.tensor,
    is_row_M: tl.tensor, norm_ptr: tl.tensor, unit_G: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    angle_stride: tl.tensor, eps: tl.tensor, H: tl.constexpr, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Move heads from the projection to their destination, normed if there is a weight, rotated if there are angles.

    They are multiplied by ``unit_G``, if given, at last.
    """
    dtype: tl.constexpr = to_MG.dtype.element_ty
    p_P = tl.arange(0, PAIR_BLOCK)
    at_P = p_P[None, None, :]
    is_in = is_in_MG[:, :, None] & (at_P < PAIRS)
    first = tl.load(from_MG1 + at_P, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(from_MG1 + PAIRS + at_P, mask=is_in, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares_MG = tl.sum(first * first + second * second, 2)
    if REST_BLOCK > 0:
        at_H = 2 * PAIRS + tl.arange(0, REST_BLOCK)
        is_rest = (at_H < H)[None, None, :]
        rest = tl.load(from_MG1 + at_H[None, None, :], mask=is_in_MG[:, :, None] & is_rest, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares_MG += tl.sum(rest * rest, 2)
    if norm_ptr is not None:
        rms = tl.rsqrt(squares_MG / H + eps)[:, :, None]
        first *= rms * tl.load(norm_ptr + p_P, mask=p_P < PAIRS, other=0.0).to(tl.float32)[None, None, :]
        second *= rms * tl.load(norm_ptr + PAIRS + p_P, mask=p_P < PAIRS, other=0.0).to(tl.float32)[None, None, :]
        if REST_BLOCK > 0:
            rest *= rms * tl.load(norm_ptr + at_H, mask=at_H < H, other=0.0).to(tl.float32)[None, None, :]
    if cos_ptr is not None:
        angle_MP = (t_M.to(tl.int64) * angle_stride)[:, None] + p_P[None, :]
        is_angle_MP = is_row_M[:, None] & (p_P < PAIRS)[None, :]
        cos = tl.load(cos_ptr + angle_MP, mask=is_angle_MP, other=0.0)[:, None, :]
        sin = tl.load(sin_ptr + angle_MP, mask=is_angle_MP, other=0.0)[:, None, :]
        first, second = first * cos - second * sin, second * cos + first * sin
    if unit_G is not None:
        first, second = first * unit_G[None, :, None], second * unit_G[None, :, None]
        if REST_BLOCK > 0:
            rest *= unit_G[None, :, None]
    is_to = is_to_MG[:, :, None] & (at_P < PAIRS)
    tl.store(to_MG[:, :, None] + at_P, first.to(dtype), mask=is_to)
    tl.store(to_MG[:, :, None] + PAIRS + at_P, second.to(dtype), mask=is_to)
    if REST_BLOCK > 0:
        tl.store(to_MG[:, :, None] + at_H[None, None, :], rest.to(dtype), mask=is_to_MG[:, :, None] & is_rest)


# ---- apply_rope: ``apply_rope`` for CUDA devices, as encoders need it: from wherever heads are in a projection's rows
# to new tensors.


@triton.jit(do_not_specialize=["T"])
def apply_rope_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, to_q_ptr: tl.tensor, to_k_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, T: tl.tensor, q_stride: tl.tensor, q_head_stride: tl.tensor, k_stride: tl.tensor,
    k_head_stride: tl.tensor, angle_stride: tl.tensor, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    QUERY_GROUPS: tl.constexpr = (N + HEADS - 1) // HEADS
    group = tl.program_id(1)
    t_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_M = t_M < T
    row_M1 = t_M.to(tl.int64)[:, None]
    after_predecessor(PDL)
    if group < QUERY_GROUPS:
        head_G = (group * HEADS + tl.arange(0, HEADS))[None, :]
        is_in_MG = is_row_M[:, None] & (head_G < N)
        from_MG = q_ptr + row_M1 * q_stride + head_G * q_head_stride
        # fmt: off
        rotate_heads(from_MG[:, :, None], to_q_ptr + (row_M1 * N + head_G) * H, is_in_MG, is_in_MG, t_M, is_row_M,
                     None, None, cos_ptr, sin_ptr, angle_stride, 0.0, H, PAIRS, PAIR_BLOCK, REST_BLOCK)
        # fmt: on
    else:
        head_G = ((group - QUERY_GROUPS) * HEADS + tl.arange(0, HEADS))[None, :]
        is_in_MG = is_row_M[:, None] & (head_G < K)
        from_MG = k_ptr + row_M1 * k_stride + head_G * k_head_stride
        # fmt: off
        rotate_heads(from_MG[:, :, None], to_k_ptr + (row_M1 * K + head_G) * H, is_in_MG, is_in_MG, t_M, is_row_M,
                     None, None, cos_ptr, sin_ptr, angle_stride, 0.0, H, PAIRS, PAIR_BLOCK, REST_BLOCK)
        # fmt: on


@apply_rope.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def apply_rope_triton(q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """See ``ops.apply_rope``."""
    (T, N, H), K, pairs = q_TNH.shape, k_TKH.shape[1], cos_TR.shape[1]
    q_TNH, k_TKH = (x if x.stride(2) == 1 else x.contiguous() for x in (q_TNH, k_TKH))
    assert cos_TR.stride() == sin_TR.stride(), "angles must lie alike"
    assert cos_TR.stride(1) == 1, "the angles of a row must lie side by side"
    to_q, to_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TNH, k_TKH))
    at_once = HEADS if H <= WIDE else 1
    if T:
        # fmt: off
        launch(
            apply_rope_kernel, (triton.cdiv(T, ROWS), triton.cdiv(N, at_once) + triton.cdiv(K, at_once)),
            q_TNH, k_TKH, to_q, to_k, cos_TR, sin_TR, T, *q_TNH.stride()[:2], *k_TKH.stride()[:2], cos_TR.stride(0),
            N=N, K=K, H=H, PAIRS=pairs, PAIR_BLOCK=triton.next_power_of_2(pairs),
            REST_BLOCK=triton.next_power_of_2(H - 2 * pairs) if 2 * pairs < H else 0, ROWS=ROWS, HEADS=at_once,
            num_warps=4,
        )
        # fmt: on
    return to_q, to_k


# ---- store_keys: ``store_keys`` for CUDA devices: the kernel that prepares attention, without queries.


@store_keys.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def store_keys_triton(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, slot_mapping_T: Tensor
) -> None:
    """See ``ops.store_keys``."""
    kv_TW = qkv_TW[:, -2 * heads.num_kv_heads * heads.head_dim :]
    keys_only = heads._replace(num_heads=0)
    if is_packed(cache.keys):
        pack_store(kv_TW, keys_only, cos_TR, sin_TR, cache, slot_mapping_T)
    else:
        rotate_store(kv_TW, keys_only, cos_TR, sin_TR, cache.keys, cache.values, slot_mapping_T, cache.scales)


# ---- store_kv: ``store_kv`` for CUDA devices: a program copies a row's keys and values; the host need not know what
# is padding. Shapes: T tokens, K kv heads, H head dim.


@triton.jit
def store_kv_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, slots_ptr: tl.tensor,
    k_scale_ptr: tl.tensor, v_scale_ptr: tl.tensor, block_size: tl.tensor, K: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row of K heads, filled up to BLOCK numbers."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    after_predecessor(PDL)
    slot = tl.load(slots_ptr + row)
    mask = (i < K * H) & (slot >= 0)
    block, offset = slot // block_size, slot % block_size
    place = ((block * K + i // H) * block_size + offset) * H + i % H
    source = row * K * H + i
    keys, values = tl.load(k_ptr + source, mask=mask), tl.load(v_ptr + source, mask=mask)
    if k_scale_ptr is not None:
        keys = keys.to(tl.float32) / tl.load(k_scale_ptr + i // H, mask=i < K * H, other=1.0)
        values = values.to(tl.float32) / tl.load(v_scale_ptr + i // H, mask=i < K * H, other=1.0)
    tl.store(k_cache_ptr + place, keys.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + place, values.to(v_cache_ptr.dtype.element_ty), mask=mask)


@store_kv.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def store_kv_triton(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
) -> None:
    """See ``ops.store_kv``."""
    T, K, H = k_TKH.shape
    if T and is_packed(k_cache):
        heads, cache = HeadLayout(0, K, H, 1.0), LayerCache(k_cache, v_cache)
        pack_store(torch.cat((k_TKH, v_TKH), 1).flatten(1), heads, None, None, cache, slot_mapping_T)
    elif T:
        k_scale, v_scale = scales or (None, None)
        launch(
            store_kv_kernel, (T,), k_TKH.contiguous(), v_TKH.contiguous(), k_cache, v_cache, slot_mapping_T,
            k_scale, v_scale, k_cache.shape[2], K, H, BLOCK=triton.next_power_of_2(K * H), num_warps=4,
        )  # fmt: skip


# ---- rotary_angles: ``rotary_angles``: a program for each token.


@rotary_angles.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def rotary_angles_triton(
    positions_T: Tensor, frequencies_R: Tensor, factor: float, chosen: RopeSet | None = None
) -> tuple[Tensor, Tensor]:
    """See ``ops.rotary_angles``."""
    T, R = len(positions_T), len(frequencies_R) // (1 if chosen is None else len(chosen.factors))
    cos_TR, sin_TR = (torch.empty(T, R, dtype=torch.float32, device=positions_T.device) for _ in range(2))
    BLOCK = triton.next_power_of_2(R)
    sets, factors = chosen or (None, None)
    launch(
        _angles_kernel, (T,), positions_T, frequencies_R, cos_TR, sin_TR, sets, factors, factor,
        R=R, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return cos_TR, sin_TR


@triton.jit
def _angles_kernel(
    positions: tl.tensor, frequencies: tl.tensor, cos: tl.tensor, sin: tl.tensor, sets: tl.tensor | None,
    factors: tl.tensor | None, factor: tl.tensor, R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    if sets is None:
        frequency = tl.load(frequencies + pair, mask=pair < R, other=0.0)
        after_predecessor(PDL)
    else:
        after_predecessor(PDL)
        chosen = tl.load(sets + row)
        frequency = tl.load(frequencies + chosen * R + pair, mask=pair < R, other=0.0)
        factor = tl.load(factors + chosen)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    tl.store(cos + row * R + pair, tl.cos(angle) * factor, mask=pair < R)
    tl.store(sin + row * R + pair, tl.sin(angle) * factor, mask=pair < R)


@axis_angles.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def axis_angles_triton(
    positions_T: Tensor, shifts_AT: Tensor, axes_R: Tensor, frequencies_R: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """See ``ops.axis_angles``."""
    T, R = len(positions_T), len(frequencies_R)
    cos_TR, sin_TR = (torch.empty(T, R, dtype=torch.float32, device=positions_T.device) for _ in range(2))
    launch(
        _axis_kernel, (T,), positions_T, shifts_AT.contiguous(), axes_R, frequencies_R, cos_TR, sin_TR, factor, T,
        R=R, BLOCK=triton.next_power_of_2(R), num_warps=1,
    )  # fmt: skip
    return cos_TR, sin_TR


@triton.jit
def _axis_kernel(
    positions: tl.tensor, shifts: tl.tensor, axes: tl.tensor, frequencies: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    factor: tl.tensor, T: tl.tensor, R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    frequency = tl.load(frequencies + pair, mask=pair < R, other=0.0)
    axis = tl.load(axes + pair, mask=pair < R, other=0)
    after_predecessor(PDL)
    position = tl.load(positions + row) + tl.load(shifts + axis * T + row, mask=pair < R, other=0)
    angle = position.to(tl.float32) * frequency
    tl.store(cos + row * R + pair, tl.cos(angle) * factor, mask=pair < R)
    tl.store(sin + row * R + pair, tl.sin(angle) * factor, mask=pair < R)
