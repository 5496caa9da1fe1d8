"""``choose_head_blocks`` for CUDA devices: what blocks are worth to tiles of rows, then the best of them.

Shapes: T tokens, S sequences, K kv heads, I width of the indexer's keys, D: I filled up to a power of two, C blocks of
a context, M: heads of a tile's rows, P positions that are loaded together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_blocks import RowPlaces
from octavo.ops.attention.choose_head_blocks import HeadBlocks, best_blocks, choose_head_blocks
from octavo.ops.attention.choose_keys import MOST_SCORES
from octavo_kernels.triton.attention.cached_rows import least_width, load_rows, rotated, run_of
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

TILE_ROWS = 16
"""Rows of a tile of prompts: they load the same keys."""
MAX_KEYS = 128
MAX_SCRATCH = MOST_SCORES // 2
"""Numbers of what blocks are worth that are held at once: ranked, each takes 16 bytes."""


@triton.jit(do_not_specialize=["first", "end", "num_tiles", "num_blocks", "table_stride"])
def block_worth_kernel(
    q_ptr: tl.tensor, index_ptr: tl.tensor, tables_ptr: tl.tensor, seqs_ptr: tl.tensor, positions_ptr: tl.tensor,
    out_ptr: tl.tensor, first: tl.tensor, end: tl.tensor, num_tiles: tl.tensor, num_blocks: tl.tensor,
    table_stride: tl.tensor, block_stride: tl.tensor, SLOT_STRIDE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, RUN: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The worth of one block to a tile of rows, which may be of several sequences.

    Programs of one block are neighbours, as they load the same keys; all are on one axis, as no other has room for the
    small blocks of a million tokens.
    """
    tile, c = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    row_M, d_D = tl.arange(0, HEADS), tl.arange(0, D)
    token_M = first + tile * ROWS + row_M // K
    is_row_M = (row_M < ROWS * K) & (token_M < end)
    at_M = token_M.to(tl.int64) * K + row_M % K
    after_predecessor(PDL)
    seq_M = tl.load(seqs_ptr + token_M, mask=is_row_M, other=-1)
    position_M = tl.load(positions_ptr + token_M, mask=is_row_M, other=-1)
    q_MD = tl.load(q_ptr + at_M[:, None] * WIDTH + d_D[None, :], mask=is_row_M[:, None] & (d_D < WIDTH), other=0.0)
    if RUN > 0:
        q_MD = q_MD.to(tl.float32)
        if RUN > 1:
            q_MD = rotated(q_MD, RUN) * (1 / RUN)
    worth_M = tl.full([HEADS], float("-inf"), tl.float32)
    for s in range(tl.min(tl.where(seq_M < 0, 0x7FFFFFFF, seq_M), 0), tl.max(seq_M, 0) + 1):
        last = tl.max(tl.where(seq_M == s, position_M, -1), 0)
        table = tables_ptr + s * table_stride
        for at in range(c * SIZE, tl.minimum(c * SIZE + SIZE, last + 1), KEYS):
            key_P = at + tl.arange(0, KEYS)
            is_key_P = (key_P <= last) & (key_P < c * SIZE + SIZE)
            block_P = tl.load(table + key_P // BLOCK_SIZE, mask=is_key_P, other=0).to(tl.int64)
            keys_PD, unit = load_rows(
                index_ptr + block_P[:, None] * block_stride, key_P[:, None] % BLOCK_SIZE, is_key_P[:, None],
                SLOT_STRIDE, WIDTH, D, RUN, None,
            )  # fmt: skip
            product_MP = tl.dot(q_MD, tl.trans(keys_PD.to(q_MD.dtype)), input_precision="ieee") * unit
            product_MP = tl.where(product_MP == product_MP, product_MP, -3.4028234663852886e38)
            is_seen_MP = (seq_M == s)[:, None] & (key_P[None, :] <= position_M[:, None]) & is_key_P[None, :]
            worth_M = tl.maximum(worth_M, tl.max(tl.where(is_seen_MP, product_MP, float("-inf")), 1))
    tl.store(out_ptr + (at_M - first * K) * num_blocks + c, worth_M, mask=is_row_M)


@choose_head_blocks.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def choose_head_blocks_triton(q_TKI: Tensor, cache: LayerCache, rows: PagedRows, rule: HeadBlocks) -> Tensor:
    """See ``ops.choose_head_blocks``. A row's choice is the same whatever the other rows are."""
    index, tables_SB = cache.index_keys, rows.of(cache).block_tables_SB
    assert index is not None, "the layer has no indexer"
    (T, K, width), block_size = q_TKI.shape, index.shape[2]
    C = triton.cdiv(tables_SB.shape[1] * block_size, rule.size)
    ids_TKB = torch.empty(T, K, min(rule.most, C), dtype=torch.int32, device=q_TKI.device)
    if not ids_TKB.numel():
        return ids_TKB
    places = RowPlaces.of(cache, rows, T)
    seqs_T = places.seqs_T.where(places.is_real_T, -1).int()
    positions_T = places.positions_T.where(places.is_real_T, -1)
    q_TKI, tile = q_TKI.contiguous(), 1 if rows.max_query_len == 1 else TILE_ROWS
    step = max(tile, MAX_SCRATCH // (K * C) // tile * tile)
    for first in range(0, T, step):
        end = min(T, first + step)
        num_tiles = triton.cdiv(end - first, tile)
        worth_QKC = torch.empty(end - first, K, C, dtype=torch.float32, device=q_TKI.device)
        launch(
            block_worth_kernel, (num_tiles * C,), q_TKI, index, tables_SB, seqs_T, positions_T.int(), worth_QKC,
            first, end, num_tiles, C, tables_SB.stride(0), index.stride(0),
            SLOT_STRIDE=index.shape[3], K=K, WIDTH=width, D=max(least_width(index), triton.next_power_of_2(width)),
            SIZE=rule.size, KEYS=max(16, min(MAX_KEYS, triton.next_power_of_2(rule.size))), BLOCK_SIZE=block_size,
            RUN=run_of(index, width), ROWS=tile, HEADS=max(16, triton.next_power_of_2(tile * K)), num_warps=4,
        )  # fmt: skip
        ids_TKB[first:end] = best_blocks(worth_QKC, positions_T[first:end], rule)
    return ids_TKB
