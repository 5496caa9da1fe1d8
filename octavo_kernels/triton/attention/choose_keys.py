"""``choose_keys`` for CUDA devices: scores of a few rows at a time, then the highest of each row by their bits.

A program finds the least score that a row keeps a byte at a time, from histograms of what agrees with it so far, and
lists the positions in order. Rows that keep all they see have no scores. All bounds are read on the device.

Shapes: T tokens, S sequences, N heads, W width of a key; a tile's keys C; B values of a byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_keys import MOST_ROWS, MOST_SCORES, ChosenKeys, choose_keys
from octavo_kernels.triton.attention.prefill_attention import key_blocks
from octavo_kernels.triton.launch import after_predecessor, declines_floats, empty_indices, launch
from octavo_kernels.triton.sampling.truncation import ordered

RUN, KEYS, WARPS = 1024, 64, 4
"""Positions that a program scores for a row, and those that it takes at a time."""
FLOAT32_KEYS = 32
"""Where products are made of multiply-adds."""
TILE, TILE_WARPS = 4096, 8
"""Scores that a program takes at a time to choose among."""


@choose_keys.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def choose_keys_triton(q_TNW: Tensor, weights_TN: Tensor, cache: LayerCache, rows: PagedRows, count: int) -> ChosenKeys:
    """See ``ops.choose_keys``."""
    index, tables_SB = cache.index_keys, rows.of(cache).block_tables_SB
    assert index is not None, "the layer has no indexer"
    (T, N, W), S, block_size = q_TNW.shape, len(rows.seq_lens_S), index.shape[2]
    assert index.stride()[2:] == (W, 1), "the slots of a block must lie side by side"
    longest = tables_SB.shape[1] * block_size
    most, q_TNW, weights_TN = min(count, longest), q_TNW.contiguous(), weights_TN.contiguous()
    slots_TK, counts_T, starts = (empty_indices(size, torch.int32, q_TNW.device) for size in (T * most, T, T + 1))
    at_once = max(1, min(T, MOST_ROWS, MOST_SCORES // longest))
    scores = torch.empty(at_once, longest, dtype=torch.float32, device=q_TNW.device)
    bounds = None if rows.max_query_len == 1 else rows.cu_seqlens_q
    sizes = {"BLOCK_SIZE": block_size, "SEQUENCES": max(16, triton.next_power_of_2(S))}
    for first in range(0, T, at_once):
        num_rows = min(at_once, T - first)
        # fmt: off
        launch(
            scores_kernel, (triton.cdiv(longest, RUN), num_rows),
            q_TNW, weights_TN, index, scores, tables_SB, bounds, rows.seq_lens_S, first, S, count, longest,
            tables_SB.stride(0), index.stride(0), N=N, W=W, NP=max(16, triton.next_power_of_2(N)),
            WP=max(16, triton.next_power_of_2(W)), RUN=RUN, KEYS=FLOAT32_KEYS if q_TNW.dtype == torch.float32 else KEYS,
            **sizes, num_warps=WARPS,
        )
        launch(
            choose_kernel, (num_rows,),
            scores, slots_TK, counts_T, starts, tables_SB, bounds, rows.seq_lens_S, first, S, T, count, longest, most,
            tables_SB.stride(0), TILE=TILE, **sizes, num_warps=TILE_WARPS,
        )
        # fmt: on
    return ChosenKeys(slots_TK.view(T, most), counts_T, starts)


@triton.jit
def seen_by_row(
    row: tl.tensor, bounds_ptr: tl.tensor, seq_lens_ptr: tl.tensor, S: tl.tensor, SEQUENCES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The sequence of a row, and how many positions it sees: 0 for padding. Without ``bounds`` a row has the number of
    its sequence."""
    if bounds_ptr is None:
        seq = row
        seen = tl.load(seq_lens_ptr + seq)
    else:
        s_S = tl.arange(0, SEQUENCES)
        end_S = tl.load(bounds_ptr + 1 + s_S, mask=s_S < S, other=0)
        before = tl.sum(((s_S < S) & (end_S <= row)).to(tl.int32), 0)
        seq = tl.minimum(before, S - 1)
        seen = tl.load(seq_lens_ptr + seq) - tl.load(bounds_ptr + 1 + seq) + row + 1
        seen = tl.where(before < S, seen, 0)
    return seq, seen


@triton.jit(do_not_specialize=["first", "S", "count", "longest", "table_stride"])
def scores_kernel(
    q_ptr: tl.tensor, weights_ptr: tl.tensor, index_ptr: tl.tensor, scores_ptr: tl.tensor, tables_ptr: tl.tensor,
    bounds_ptr: tl.tensor, seq_lens_ptr: tl.tensor, first: tl.tensor, S: tl.tensor, count: tl.tensor,
    longest: tl.tensor, table_stride: tl.tensor, block_stride: tl.tensor, N: tl.constexpr, W: tl.constexpr,
    NP: tl.constexpr, WP: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The scores of a run of positions for one row."""
    row = first + tl.program_id(1)
    after_predecessor(PDL)
    seq, seen = seen_by_row(row, bounds_ptr, seq_lens_ptr, S, SEQUENCES)
    begin = tl.program_id(0) * RUN
    if (seen > count) & (begin < seen):
        n_N, w_W = tl.arange(0, NP), tl.arange(0, WP)
        at_NW = (row.to(tl.int64) * N + n_N)[:, None] * W + w_W[None, :]
        q_NW = tl.load(q_ptr + at_NW, mask=(n_N < N)[:, None] & (w_W < W)[None, :], other=0.0)
        weights_N = tl.load(weights_ptr + row.to(tl.int64) * N + n_N, mask=n_N < N, other=0.0)
        tables_ptr += seq.to(tl.int64) * table_stride
        to_ptr = scores_ptr + tl.program_id(1).to(tl.int64) * longest
        end = tl.minimum(begin + RUN, seen)
        for at in tl.range(begin, end, KEYS):
            key_C = at + tl.arange(0, KEYS)
            block = key_blocks(tables_ptr, at, end, BLOCK_SIZE, KEYS)
            at_C1 = index_ptr + block.to(tl.int64) * block_stride + (key_C % BLOCK_SIZE)[:, None] * W
            is_key_CW = (key_C < end)[:, None] & (w_W < W)[None, :]
            k_CW = tl.load(at_C1 + w_W[None, :], mask=is_key_CW, other=0.0).to(q_NW.dtype)
            products_NC = tl.maximum(tl.dot(q_NW, tl.trans(k_CW), input_precision="ieee"), 0.0)
            tl.store(to_ptr + key_C, tl.sum(products_NC * weights_N[:, None], 0), mask=key_C < end)


@triton.jit(do_not_specialize=["first", "S", "T", "count", "longest", "most", "table_stride"])
def choose_kernel(
    scores_ptr: tl.tensor, slots_ptr: tl.tensor, counts_ptr: tl.tensor, starts_ptr: tl.tensor, tables_ptr: tl.tensor,
    bounds_ptr: tl.tensor, seq_lens_ptr: tl.tensor, first: tl.tensor, S: tl.tensor, T: tl.tensor, count: tl.tensor,
    longest: tl.tensor, most: tl.tensor, table_stride: tl.tensor, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The slots of the positions that one row keeps."""
    row, i_C = first + tl.program_id(0), tl.arange(0, TILE)
    after_predecessor(PDL)
    seq, seen = seen_by_row(row, bounds_ptr, seq_lens_ptr, S, SEQUENCES)
    total = T
    if bounds_ptr is not None:
        total = tl.load(bounds_ptr + S)
    tl.store(counts_ptr + row, tl.minimum(seen, count))
    tl.store(starts_ptr + row, tl.minimum(row, total))
    tl.store(starts_ptr + row + 1, tl.minimum(row + 1, total))
    scores_ptr += tl.program_id(0).to(tl.int64) * longest
    slots_ptr += row.to(tl.int64) * most
    tables_ptr += seq.to(tl.int64) * table_stride
    is_all = seen <= count
    # The least score that is kept, as an ordered number: its first bytes, and how many that agree are still wanted.
    least, wanted = tl.full([], 0, tl.int32), tl.where(is_all, 0, count)
    if not is_all:
        for level in tl.static_range(4):
            least, wanted = _narrowed(scores_ptr, seen, least, wanted, level, TILE)
    done, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for at in tl.range(0, seen, TILE):
        position_C = at + i_C
        is_kept_C = position_C < seen
        if not is_all:
            code_C = _codes(scores_ptr, position_C, seen)
            is_equal_C = is_kept_C & (code_C == least)
            rank_C = equal + tl.cumsum(is_equal_C.to(tl.int32), 0)
            is_kept_C &= (code_C > least) | (is_equal_C & (rank_C <= wanted))
            equal += tl.sum(is_equal_C.to(tl.int32), 0)
        place_C = done + tl.cumsum(is_kept_C.to(tl.int32), 0) - 1
        block_C = tl.load(tables_ptr + position_C // BLOCK_SIZE, mask=is_kept_C, other=0)
        tl.store(slots_ptr + place_C, block_C * BLOCK_SIZE + position_C % BLOCK_SIZE, mask=is_kept_C)
        done += tl.sum(is_kept_C.to(tl.int32), 0)


@triton.jit
def _narrowed(
    scores_ptr: tl.tensor, seen: tl.tensor, least: tl.tensor, wanted: tl.tensor, LEVEL: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The first LEVEL + 1 bytes of the least score that is kept, given one less, and how many with these are wanted."""
    SHIFT: tl.constexpr = 24 - 8 * LEVEL
    b_B, i_C = tl.arange(0, 256), tl.arange(0, TILE)
    found_B = tl.zeros([256], tl.int32)
    for at in tl.range(0, seen, TILE):
        code_C = _codes(scores_ptr, at + i_C, seen)
        is_alike_C = at + i_C < seen
        if LEVEL == 0:
            byte_C = (code_C >> SHIFT) + 128
        else:
            is_alike_C &= (code_C >> (SHIFT + 8)) == least
            byte_C = (code_C >> SHIFT) & 255
        found_B += tl.histogram(byte_C, 256, mask=is_alike_C)
    from_B = tl.sum(found_B, 0) - tl.cumsum(found_B, 0) + found_B
    byte = tl.sum((from_B >= wanted).to(tl.int32), 0) - 1
    wanted -= tl.sum(tl.where(b_B > byte, found_B, 0), 0)
    least = byte - 128 if LEVEL == 0 else least * 256 + byte
    return least, wanted


@triton.jit
def _codes(scores_ptr: tl.tensor, position_C: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """The scores of these positions as integers of the same order."""
    return ordered(tl.load(scores_ptr + position_C, mask=position_C < seen, other=0.0)).to(tl.int32)
