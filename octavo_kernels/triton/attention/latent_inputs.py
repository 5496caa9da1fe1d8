"""Between the projections of a layer with latent attention and its attention: map and rotate queries, norm and rotate
the key, store it in the cache.

A program takes a tile of rows of one head and maps it to some of the latent's numbers. The programs of a tile share its
rows for the rotation. Those of the key, which is one more head here, share them for all that is done with it. Where
there are many rows, cuBLAS maps them before.

Shapes: T tokens, N heads, P plain part of a projected query, R rotated pairs, L latent, W = N (P + 2 R), C = L + 2 R,
H = 2 R + L; a tile's rows M and outputs B, and the rows E of which a program does the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.latent_attention import LatentHeads, store_latents
from octavo_kernels.triton.attention.rotate_store import rotate_heads
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch
from octavo_kernels.triton.linear.head_linear import (
    Tile,
    cublas_head_linear,
    head_tile,
    prefetch_outputs,
    takes_tiles,
    tile_of,
)

ROWS = 8
"""Rows of a program where cuBLAS maps the queries."""


@store_latents.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def store_latents_triton(
    q_TW: Tensor, kv_TC: Tensor, heads: LatentHeads, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.store_latents``."""
    return latent_inputs(q_TW, kv_TC, heads, cos_TR, sin_TR, cache.keys, rows.of(cache).slot_mapping_T)


def latent_inputs(
    q_TW: Tensor, kv_TC: Tensor, heads: LatentHeads, cos_TR: Tensor, sin_TR: Tensor, cache: Tensor, slots_T: Tensor
) -> Tensor:
    """Queries as attention takes them, a new tensor [T, N, H]; keys go to their slots.

    As ``ops.head_linear``, ``ops.rms_norm``, ``ops.apply_rope`` and ``ops.store_kv`` together, in float32 in between.
    Nothing is stored for rows of a negative slot.
    """
    (N, L, P), (T, R) = heads.key_map_NLP.shape, cos_TR.shape
    assert q_TW.stride(1) == kv_TC.stride(1) == 1, "the columns of a row must lie side by side"
    assert cache.shape[1] == 1, "latents have one kv head"
    assert cache.stride()[2:] == (2 * R + L, 1), "the slots of a block must lie side by side"
    q_TNH = q_TW.new_empty(T, N, 2 * R + L)
    maps = takes_tiles(T)
    if maps:
        tile = tile_of(T, q_TW.dtype)
        parts = triton.cdiv(L, tile.outputs)
    else:
        cublas_head_linear(q_TW.view(T, N, P + 2 * R)[..., :P], heads.key_map_NLP, q_TNH[..., 2 * R :])
        tile, parts = Tile(ROWS, 1, 1, 1), 1
    # fmt: off
    launch(
        latent_inputs_kernel, (triton.cdiv(T, tile.rows), parts, N + 1),
        q_TW, kv_TC, heads.key_map_NLP, heads.norm_L, cos_TR, sin_TR, slots_T, q_TNH, cache,
        T, q_TW.stride(0), kv_TC.stride(0), cos_TR.stride(0), cache.stride(0), heads.norm_eps,
        N=N, P=P, L=L, R=R, LP=triton.next_power_of_2(L), RP=triton.next_power_of_2(max(1, R)),
        BLOCK_SIZE=cache.shape[2], SHARE=triton.next_power_of_2(triton.cdiv(tile.rows, parts)), MAPS=maps,
        **tile.constants(),
    )
    # fmt: on
    return q_TNH


@triton.jit(do_not_specialize=["T"])
def latent_inputs_kernel(
    q_ptr: tl.tensor, kv_ptr: tl.tensor, map_ptr: tl.tensor, norm_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, slots_ptr: tl.tensor, out_ptr: tl.tensor, cache_ptr: tl.tensor, T: tl.tensor,
    q_stride: tl.tensor, kv_stride: tl.tensor, angle_stride: tl.tensor, block_stride: tl.tensor, eps: tl.tensor,
    N: tl.constexpr, P: tl.constexpr, L: tl.constexpr, R: tl.constexpr, LP: tl.constexpr, RP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SHARE: tl.constexpr, MAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The part of a tile for one head, or for the key, of which SHARE rows are this program's own."""
    part, n = tl.program_id(1), tl.program_id(2)
    o_B = part * BLOCK_O + tl.arange(0, BLOCK_O)
    map_ptr += tl.minimum(n, N - 1).to(tl.int64) * L * P
    if MAPS:
        prefetch_outputs(map_ptr, o_B, P, L, PDL)
    after_predecessor(PDL)
    first = tl.program_id(0) * ROWS
    m_E = part * SHARE + tl.arange(0, SHARE)
    t_E, is_row_E = first + m_E, (m_E < ROWS) & (first + m_E < T)
    if n < N:
        q_ptr += n * (P + 2 * R)
        out_ptr += n * (2 * R + L)
        to_E = out_ptr + t_E.to(tl.int64) * (N * (2 * R + L))
        from_E = q_ptr + t_E.to(tl.int64) * q_stride + P
        if R > 0:
            _rotate(from_E, to_E, is_row_E, t_E, is_row_E, cos_ptr, sin_ptr, angle_stride, R, RP)
        if MAPS:
            t_M = first + tl.arange(0, ROWS)
            q_M = q_ptr + t_M.to(tl.int64) * q_stride
            latent_MB = head_tile(q_M, t_M < T, map_ptr, o_B, P, L, BLOCK_K, STAGES)
            to_MB = out_ptr + (t_M.to(tl.int64) * (N * (2 * R + L)) + 2 * R)[:, None] + o_B[None, :]
            is_latent_MB = (t_M < T)[:, None] & (o_B < L)[None, :]
            tl.store(to_MB, latent_MB.to(out_ptr.dtype.element_ty), mask=is_latent_MB)
    else:
        slot_E = tl.load(slots_ptr + t_E, mask=is_row_E, other=-1)
        slots_E = cache_ptr + slot_E // BLOCK_SIZE * block_stride + slot_E % BLOCK_SIZE * (2 * R + L)
        key_E = kv_ptr + t_E.to(tl.int64) * kv_stride
        if R > 0:
            _rotate(key_E + L, slots_E, slot_E >= 0, t_E, is_row_E, cos_ptr, sin_ptr, angle_stride, R, RP)
        _norm(key_E, slots_E + 2 * R, slot_E >= 0, norm_ptr, eps, L, LP)


@triton.jit
def _rotate(
    from_E: tl.tensor, to_E: tl.tensor, is_to_E: tl.tensor, t_E: tl.tensor, is_row_E: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, angle_stride: tl.tensor, R: tl.constexpr, RP: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate the 2 R numbers from here on, by the angles of their rows, and store them there."""
    rotate_heads(
        from_E[:, None, None], to_E[:, None], is_row_E[:, None], is_to_E[:, None], t_E, is_row_E, None,
        None, cos_ptr, sin_ptr, angle_stride, 0.0, 2 * R, R, RP, 0,
    )  # fmt: skip


@triton.jit
def _norm(
    from_E: tl.tensor, to_E: tl.tensor, is_to_E: tl.tensor, norm_ptr: tl.tensor, eps: tl.tensor, L: tl.constexpr,
    LP: tl.constexpr,
) -> None:  # fmt: skip
    """Norm the L numbers from here on and store them there."""
    d_L = tl.arange(0, LP)
    norm_L = tl.load(norm_ptr + d_L, mask=d_L < L, other=0.0).to(tl.float32)
    mask = is_to_E[:, None] & (d_L < L)[None, :]
    x_EL = tl.load(from_E[:, None] + d_L[None, :], mask=mask, other=0.0).to(tl.float32)
    rms_E = tl.rsqrt(tl.sum(x_EL * x_EL, 1) / L + eps)
    latent_EL = x_EL * rms_E[:, None] * norm_L[None, :]
    tl.store(to_E[:, None] + d_L[None, :], latent_EL.to(to_E.dtype.element_ty), mask=mask)
