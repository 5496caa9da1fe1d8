"""Latent attention of prompts, for Hopper: keys and values of every head are expanded from the latents first.

On latents a score takes L + 2 R multiplications and a weighted value L; on keys and values of its own a head takes
P + 2 R and V, a third of them for DeepSeek's sizes, but those must be made: L (P + V) for each position of the context.
That pays from some 100 rows of a sequence on (DeepSeek-V2, arXiv 2405.04434, has both forms). The rotated part of the
key is one for all heads.

All bounds are read on the device. Expanded keys and values go to a buffer of fixed size, one sequence behind the other;
sequences for which it has no room are attended on their latents, as are those of few rows.

Shapes: T tokens, S sequences, N heads, P plain part of a head, R rotated pairs, V values of a head, L latent, Q = 2 R;
a tile's keys C and latent numbers B that it takes at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_keys import longest_context
from octavo.ops.attention.latent_attention import EXPANDED_WIDTHS, LatentHeads, expanded_positions
from octavo_kernels.triton.launch import after_predecessor, has_gluon, is_invariant, launch, num_multiprocessors

LEAST_ROWS = tl.constexpr(128)
"""Rows of a sequence from which on it is worth it: those of a tile of attention."""
TILE = tl.constexpr(128)
"""Keys that a program expands at a time."""
BLOCK_L, STAGES, WARPS = 64, 3, 8


class Expanded(NamedTuple):
    """Room for the keys and values of ``positions``, a multiple of a tile."""

    keys_NCP: Tensor
    rotated_CQ: Tensor
    values_NCV: Tensor

    @property
    def num_tiles(self) -> int:
        return len(self.rotated_CQ) // int(TILE.value)


@functools.cache
def _room(device: torch.device, dtype: torch.dtype, heads: int, positions: int) -> Expanded:
    """The buffer, shared by all layers and steps. Never freed, as captured graphs use it."""
    plain, rotated, value = EXPANDED_WIDTHS
    shapes = (heads, positions, plain), (positions, rotated), (heads, positions, value)
    return Expanded(*(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))


def room_for(q_TNH: Tensor, heads: LatentHeads, cache: LayerCache, rows: PagedRows) -> Expanded | None:
    """Where the keys and values of this step's prompts are expanded, or ``None`` if they are not."""
    (N, L, P), V = heads.key_map_NLP.shape, heads.value_map_NVL.shape[1]
    is_supported = q_TNH.dtype in (torch.bfloat16, torch.float16) and L % BLOCK_L == 0
    is_plain = is_supported and heads.sinks_N is None and not heads.window
    if (P, q_TNH.shape[2] - L, V) != EXPANDED_WIDTHS or not is_plain:
        return None
    if rows.max_query_len < LEAST_ROWS.value or is_invariant() or not has_gluon(q_TNH.device):
        return None
    positions = expanded_positions(N, longest_context(cache, rows), q_TNH.element_size())
    return _room(q_TNH.device, q_TNH.dtype, N, triton.cdiv(positions, TILE.value) * TILE.value)


def attend_prompts(
    q_TNX: Tensor,
    q_TNQ: Tensor,
    heads: LatentHeads,
    cache: LayerCache,
    rows: PagedRows,
    room: Expanded,
    out_TNV: Tensor,
) -> None:
    """Fill ``out`` for the sequences of at least ``LEAST_ROWS`` rows for which there is room.

    Queries are the P plain numbers at the front of ``q_TNX`` and the rotated ones ``q_TNQ``; keys are stored already.
    """
    from octavo_kernels.hopper.prefill_attention import PAGE, hopper_prefill

    pages_SB, ends_S = expand(heads, cache, rows, room, PAGE)
    keys, values = (part.view(len(part), -1, PAGE, part.shape[2]).transpose(0, 1) for part in room[::2])
    rotated = room.rotated_CQ.view(-1, 1, PAGE, room.rotated_CQ.shape[1])
    queries, spans = (q_TNX[..., : keys.shape[3]], q_TNQ), (rows.cu_seqlens_q[:-1], ends_S)
    hopper_prefill(queries, (keys, rotated), values, pages_SB, spans, rows.seq_lens_S, heads.scale, False, out_TNV)


def expand(heads: LatentHeads, cache: LayerCache, rows: PagedRows, room: Expanded, page: int) -> tuple[Tensor, Tensor]:
    """Fill ``room``; the pages of each sequence in it, int32 [S, B], and where its rows end, int32 [S].

    Rows of a sequence that is not expanded end where they begin. Positions behind a sequence's end are zeros.
    """
    (N, L, P), (V, Q), S = heads.key_map_NLP.shape, EXPANDED_WIDTHS[:0:-1], len(rows.seq_lens_S)
    latents, block_tables_SB = cache.keys, rows.of(cache).block_tables_SB
    assert heads.key_map_NLP.is_contiguous()
    assert heads.value_map_NVL.is_contiguous()
    pages_SB = block_tables_SB.new_empty(S, room.num_tiles * TILE.value // page)
    ends_S = rows.seq_lens_S.new_empty(S)
    # fmt: off
    launch(
        expand_kernel, (num_multiprocessors(latents.device),),
        latents, heads.key_map_NLP, heads.value_map_NVL, block_tables_SB, rows.cu_seqlens_q, rows.seq_lens_S,
        *room, pages_SB, ends_S, S, room.num_tiles, block_tables_SB.stride(0), latents.stride(0), pages_SB.stride(0),
        N=N, P=P, V=V, L=L, Q=Q, BLOCK_SIZE=latents.shape[2], PAGE=page, BLOCK_L=BLOCK_L, STAGES=STAGES,
        SEQUENCES=max(128, triton.next_power_of_2(S)), num_warps=WARPS,
    )
    # fmt: on
    return pages_SB, ends_S


@triton.jit
def expanded_tiles(
    cu_seqlens_ptr: tl.tensor, seq_lens_ptr: tl.tensor, S: tl.tensor, room: tl.tensor, SEQUENCES: tl.constexpr
) -> tl.tensor:
    """Tiles of keys of each sequence that is expanded, 0 of others; ``room`` are those that the buffer holds."""
    s_S = tl.arange(0, SEQUENCES)
    num_rows_S = tl.load(cu_seqlens_ptr + s_S + 1, mask=s_S < S, other=0)
    num_rows_S -= tl.load(cu_seqlens_ptr + s_S, mask=s_S < S, other=0)
    num_tiles_S = tl.cdiv(tl.load(seq_lens_ptr + s_S, mask=s_S < S, other=0), TILE)
    num_tiles_S = tl.where(num_rows_S >= LEAST_ROWS, num_tiles_S, 0)
    return tl.where(tl.cumsum(num_tiles_S) <= room, num_tiles_S, 0)


@triton.jit(do_not_specialize=["S", "room", "table_stride", "page_stride"])
def expand_kernel(
    cache_ptr: tl.tensor, key_map_ptr: tl.tensor, value_map_ptr: tl.tensor, tables_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor, seq_lens_ptr: tl.tensor, keys_ptr: tl.tensor, rotated_ptr: tl.tensor,
    values_ptr: tl.tensor, pages_ptr: tl.tensor, ends_ptr: tl.tensor, S: tl.tensor, room: tl.tensor,
    table_stride: tl.tensor, block_stride: tl.tensor, page_stride: tl.tensor, N: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, Q: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_L: tl.constexpr, STAGES: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Tiles of keys and values of one head after another; that of the first head copies the rotated part, too."""
    s_S, p_P, v_V, q_Q = tl.arange(0, SEQUENCES), tl.arange(0, P), tl.arange(0, V), tl.arange(0, Q)
    after_predecessor(PDL)
    num_tiles_S = expanded_tiles(cu_seqlens_ptr, seq_lens_ptr, S, room, SEQUENCES)
    end_tile_S = tl.cumsum(num_tiles_S)
    if tl.program_id(0) == 0:
        end_ptr_S = cu_seqlens_ptr + s_S + (num_tiles_S > 0).to(tl.int32)
        tl.store(ends_ptr + s_S, tl.load(end_ptr_S, mask=s_S < S), mask=s_S < S)
    num_items = tl.sum(num_tiles_S) * N
    for done in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1, disable_licm=True):
        item = num_items - 1 - done
        tile, n = item // N, item % N
        s = tl.sum((end_tile_S <= tile).to(tl.int32))
        first = (tile - tl.sum(tl.where(s_S < s, num_tiles_S, 0))) * TILE
        key_C = first + tl.arange(0, TILE)
        is_key_C1 = (key_C < tl.load(seq_lens_ptr + s))[:, None]
        to_C = tile * TILE + tl.arange(0, TILE)
        table_ptr = tables_ptr + s.to(tl.int64) * table_stride
        block_C1 = tl.load(table_ptr + key_C[:, None] // BLOCK_SIZE, mask=is_key_C1, other=0).to(tl.int64)
        at_C1 = cache_ptr + block_C1 * block_stride + key_C[:, None] % BLOCK_SIZE * (Q + L)
        keys_CP, values_CV = _expand(
            at_C1 + Q, is_key_C1, key_map_ptr + n * L * P, value_map_ptr + n * V * L, P, V, L, BLOCK_L, STAGES
        )
        row_C1 = (n * room * TILE + to_C)[:, None].to(tl.int64)
        tl.store(keys_ptr + row_C1 * P + p_P[None, :], keys_CP.to(keys_ptr.dtype.element_ty))
        tl.store(values_ptr + row_C1 * V + v_V[None, :], values_CV.to(values_ptr.dtype.element_ty))
        if n == 0:
            rotated_CQ = tl.load(at_C1 + q_Q[None, :], mask=is_key_C1, other=0.0)
            to_CQ = rotated_ptr + to_C[:, None] * Q + q_Q[None, :]
            tl.store(to_CQ, rotated_CQ.to(rotated_ptr.dtype.element_ty))
            page = tl.arange(0, TILE // PAGE)
            to_pages = pages_ptr + s.to(tl.int64) * page_stride + first // PAGE + page
            tl.store(to_pages, tile * (TILE // PAGE) + page)


@triton.jit
def _expand(
    at_C1: tl.tensor, is_key_C1: tl.tensor, key_map_ptr: tl.tensor, value_map_ptr: tl.tensor, P: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Plain parts of the keys, and values, of one head for the latents that begin at these addresses, in float32."""
    p_P, v_V = tl.arange(0, P), tl.arange(0, V)
    keys_CP = tl.zeros([at_C1.shape[0], P], tl.float32)
    values_CV = tl.zeros([at_C1.shape[0], V], tl.float32)
    for begin in tl.range(0, L, BLOCK_L, num_stages=STAGES):
        l_B = begin + tl.arange(0, BLOCK_L)
        key_map_BP = tl.load(key_map_ptr + l_B[:, None] * P + p_P[None, :])
        value_map_VB = tl.load(value_map_ptr + v_V[:, None] * L + l_B[None, :])
        latents_CB = tl.load(at_C1 + l_B[None, :], mask=is_key_C1, other=0.0).to(key_map_BP.dtype)
        keys_CP = tl.dot(latents_CB, key_map_BP, keys_CP, input_precision="ieee")
        values_CV = tl.dot(latents_CB, tl.trans(value_map_VB), values_CV, input_precision="ieee")
    return keys_CP, values_CV
