"""Causal attention of runs of rows over the paged cache: prompts, chunks of them, and any mixture with single rows.

A program computes a tile of rows for one kv head: some tokens, each with the G query heads that share the kv head, so
that a key is loaded once for all of them. The softmax is taken while walking over the keys (Dao et al., arXiv
2205.14135; running maximum and sum after Milakov and Gimelshein, arXiv 1805.02867), in powers of two.

Where there are fewer tiles than programs, as of a short prompt behind a long context, several programs share the keys
of a tile ("Flash-Decoding", Dao et al., 2023), and the last to finish combines their sums in the order of positions.
The device tells how many: the host knows shapes alone.

Shapes: T tokens, S sequences, N heads, K kv heads, G = N / K, H head dim, M rows of a tile, C keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import KVScales
from octavo.ops.collective import WHOLE_CONTEXT, ContextPart
from octavo_kernels.triton.attention.cached_rows import least_width, load_rows, row_assembly, run_of, turned_back
from octavo_kernels.triton.attention.decode_attention import extent_of, sinks_stride
from octavo_kernels.triton.attention.decode_qkv import load_scales
from octavo_kernels.triton.launch import (
    MOST_BESIDE,
    after_predecessor,
    counters,
    is_invariant,
    launch,
    num_multiprocessors,
    shared_bytes,
)
from octavo_kernels.triton.split_sums import LOG2_E, NO_SCORE, add_parts, leave_part, part_count, store_log

MAX_HEAD_DIM = 512

MOST_SLOTS = 1024
"""Parts of tiles, of all kv heads."""
WIDEST_SHARED = 128
"""Head dim up to which tiles are shared: sums of wider ones take all registers of the program that combines them."""
LEAST_SHARE = tl.constexpr(512)
"""Keys of a part."""


class PrefillTile(NamedTuple):
    """How a tile is computed: its rows and keys, the warps that do it, and how many key tiles are in flight."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """Most of a thread, so that more programs share a multiprocessor."""


CONFIGS: dict[tuple[int, int], PrefillTile] = {
    (2, 64): PrefillTile(64, 64, 4, 3),
    (2, 128): PrefillTile(64, 64, 4, 3),
    (2, 256): PrefillTile(128, 32, 8, 3),
    (2, 512): PrefillTile(64, 32, 8, 2),
    (4, 64): PrefillTile(32, 32, 4, 2),
    (4, 128): PrefillTile(32, 32, 4, 2),
    (4, 256): PrefillTile(16, 32, 4, 2),
    (4, 512): PrefillTile(16, 16, 4, 1),
}
"""By bytes of a query's element and head dim rounded up to a power of two, at least 64."""
WIDE_HEADS, LEAST_SHARED = {(2, 256): PrefillTile(64, 32, 8, 3), (2, 512): PrefillTile(32, 16, 4, 2)}, 200 * 1024
"""Where a program may have less shared memory than on Hopper: most GPUs have 99 KiB, and tiles for Hopper take 104 and
192, and more registers than there are. These take 68 and 65 KiB."""

MAX_SPARE, RESIDENT = 16, 4
"""Programs beyond those for full tiles, for the last tiles of as many sequences: so many, or as many as all
multiprocessors can run, if each runs the second number; more sequences share programs."""


def prefill_attention(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_S: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
    scales: KVScales | None = None,
    slopes_N: Tensor | None = None,
    bias_TNE: Tensor | None = None,
    skip_single: bool = False,
    out: Tensor | None = None,
    config: PrefillTile | None = None,
    part: ContextPart = WHOLE_CONTEXT,
) -> Tensor:
    """``ops.paged_attention`` for any numbers of rows; ``out`` (or a new tensor) [T, N, H] of q's dtype, or the result
    of ``ops.partial_attention`` over this part of each context.

    With ``skip_single`` the rows of sequences that have exactly one are not written. Rows of no sequence never are.
    Keys are processed in tiles that begin at multiples of their size, and masked keys contribute exactly zero: with one
    ``config`` a row's bits are the same wherever its chunk begins and whatever the other rows are, within
    ``invariant()``; else more programs may share its keys where there are fewer rows.
    """
    T, N, H = q_TNH.shape
    K, block_size = k_cache.shape[1:3]
    out_TNH = torch.empty_like(q_TNH) if out is None else out
    _check(q_TNH, out_TNH, k_cache, v_cache, scale)
    S, group, head_block = seq_lens_S.shape[0], N // K, max(least_width(k_cache), triton.next_power_of_2(H))
    config = config or config_for(q_TNH.element_size(), head_block, shared_bytes(q_TNH.device))
    rows = max(config.rows, triton.next_power_of_2(group))
    full, at_once = T // (rows // group), triton.cdiv(RESIDENT * num_multiprocessors(q_TNH.device), K)
    can_share = not (window or is_invariant()) and part.size == 1 and head_block <= WIDEST_SHARED
    slots = _slots(q_TNH.device, K, full) if can_share else 0
    programs = max(min(full + min(S, max(MAX_SPARE, at_once - full)), MOST_BESIDE), slots)
    shares, run = K * slots * rows, run_of(k_cache, H)
    scale /= max(1, run)
    cap_in = 2 * LOG2_E.value * scale / softcap if softcap else 0.0  # capped scores need no further scale
    # fmt: off
    launch(
        _prefill_kernel, (K, programs),
        q_TNH, k_cache, v_cache, out_TNH, block_tables_SB, cu_seqlens_q, seq_lens_S, sinks_N, slopes_N, bias_TNE,
        *(scales or (None, None)),
        *(torch.empty(shares * size, dtype=torch.float32, device=q_TNH.device) if slots else None for size in (H, 1)),
        counters(q_TNH.device, MOST_SLOTS) if slots else None, slots,
        extent_of(bias_TNE), sinks_stride(sinks_N), 1.0 if softcap else LOG2_E.value * scale, cap_in,
        LOG2_E.value * softcap, window, S,
        q_TNH.stride(0), out_TNH.stride(0), block_tables_SB.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2],
        RANK=part.rank, PARTS=part.size, X=out_TNH.shape[2],
        GROUP=group, H=H, HEAD_BLOCK=head_block, BLOCK_SIZE=block_size, SLOT_STRIDE=k_cache.shape[3], ROWS=rows,
        KEYS=config.keys, RUN=run, ASSEMBLY=row_assembly(k_cache, q_TNH.dtype),
        SEQUENCES=max(128, triton.next_power_of_2(S)), SKIP_SINGLE=skip_single, HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0, SHARED=slots > 0, STAGES=config.stages, num_warps=config.warps,
        maxnreg=config.registers,
    )
    # fmt: on
    return out_TNH


def _check(q_TNH: Tensor, out_TNX: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> None:
    assert q_TNH.shape[2] <= MAX_HEAD_DIM, f"head_dim {q_TNH.shape[2]} is more than {MAX_HEAD_DIM}"
    assert scale > 0, "the scale of scores must be positive"
    assert q_TNH.stride()[1:] == (q_TNH.shape[2], 1), "the heads of a row must lie side by side"
    assert out_TNX.stride()[1:] == (out_TNX.shape[2], 1), "the heads of a result must lie side by side"
    strides = (k_cache.shape[3], 1)
    assert k_cache.stride()[2:] == v_cache.stride()[2:] == strides, "the slots of a block must lie side by side"


def _slots(device: torch.device, K: int, full: int) -> int:
    """Parts of tiles of a kv head of which ``full`` have all rows; 0 where no tile could have two."""
    slots = min(2 * num_multiprocessors(device), MOST_SLOTS) // K
    return slots if slots >= 2 * max(1, full) else 0


def config_for(element: int, head_block: int, room: int) -> PrefillTile:
    """The tile for queries of ``element`` bytes a number on a GPU with ``room`` bytes of shared memory a program."""
    size = element, max(64, head_block)
    return WIDE_HEADS[size] if size in WIDE_HEADS and room < LEAST_SHARED else CONFIGS[size]


@triton.jit(do_not_specialize=["S", "table_stride", "slots"])
def _prefill_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, out_ptr: tl.tensor, tables_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor, seq_lens_ptr: tl.tensor, sinks_ptr: tl.tensor, slopes_ptr: tl.tensor,
    bias_ptr: tl.tensor, k_scale_ptr: tl.tensor, v_scale_ptr: tl.tensor, values_ptr: tl.tensor, logs_ptr: tl.tensor,
    counters_ptr: tl.tensor, slots: tl.tensor, extent: tl.tensor, sinks_stride: tl.tensor, scale: tl.tensor,
    cap_in: tl.tensor, cap_out: tl.tensor, window: tl.tensor, S: tl.tensor, q_stride: tl.tensor, out_stride: tl.tensor,
    table_stride: tl.tensor, k_block_stride: tl.tensor, k_head_stride: tl.tensor, v_block_stride: tl.tensor,
    v_head_stride: tl.tensor, RANK: tl.constexpr, PARTS: tl.constexpr, X: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr, ASSEMBLY: tl.constexpr, SEQUENCES: tl.constexpr,
    SKIP_SINGLE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHARED: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the tiles of one kv head, those of a sequence from its last rows, which see most keys, to its first."""
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head, row_M, h_H = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, HEAD_BLOCK)
    k_ptr, v_ptr = k_ptr + kv_head * k_head_stride, v_ptr + kv_head * v_head_stride
    head_M = kv_head * GROUP + row_M % GROUP
    at_MH = head_M[:, None] * H + h_H[None, :]
    k_scale, v_scale = load_scales(k_scale_ptr, v_scale_ptr, kv_head)
    scale, cap_in = (scale, cap_in * k_scale) if HAS_SOFTCAP else (scale * k_scale, cap_in)
    after_predecessor(PDL)
    first_peak_M, first_sum_M = tl.full([ROWS], NO_SCORE, tl.float32), tl.zeros([ROWS], tl.float32)
    slope_M, is_head_M = None, row_M < TOKENS * GROUP
    if slopes_ptr is not None:  # of scores before their scale
        slope_M = tl.load(slopes_ptr + head_M, mask=is_head_M, other=0.0) * (LOG2_E / scale)
    s_S = tl.arange(0, SEQUENCES)
    num_tiles_S = _tiles(cu_seqlens_ptr, s_S, S, TOKENS, SKIP_SINGLE)
    end_tile_S, num_tiles = tl.cumsum(num_tiles_S), tl.sum(num_tiles_S)
    parts = tl.maximum(slots // tl.maximum(num_tiles, 1), 1) if SHARED else 1
    for done in tl.range(tl.program_id(1), num_tiles * parts, tl.num_programs(1), num_stages=1, disable_licm=True):
        tile = num_tiles - 1 - done // parts
        s = tl.sum((end_tile_S <= tile).to(tl.int32))
        start, stop = tl.load(cu_seqlens_ptr + s), tl.load(cu_seqlens_ptr + s + 1)
        first = start + (tile - tl.sum(tl.where(s_S < s, num_tiles_S, 0))) * TOKENS
        shift = tl.load(seq_lens_ptr + s) - stop  # from a row to its position
        token_M = first + row_M // GROUP
        is_row_M = (token_M < stop) & (row_M < TOKENS * GROUP)
        is_in_MH = is_row_M[:, None] & (h_H < H)[None, :]
        end = shift + tl.minimum(first + TOKENS, stop)
        part, own_parts, share = _share(done, parts, end, KEYS, SHARED)
        if sinks_ptr is not None:  # a sink is a key whose value is 0, of the first part
            sinks_M = sinks_ptr + token_M.to(tl.int64) * sinks_stride + head_M
            first_peak_M, first_sum_M = _sinks(sinks_M, is_row_M, part, SHARED)
        bias_M = None if bias_ptr is None else _biases(bias_ptr, token_M, head_M, GROUP, extent)
        q_MH = tl.load(q_ptr + token_M[:, None].to(tl.int64) * q_stride + at_MH, mask=is_in_MH, other=0.0)
        # fmt: off
        acc_MH, peak_M, sum_M = _attend(
            q_MH, first_peak_M, first_sum_M, shift + token_M, shift + first + 1, end, part * share, share, k_ptr, v_ptr,
            tables_ptr + s.to(tl.int64) * table_stride, k_block_stride, v_block_stride, scale, cap_in, cap_out,
            slope_M, bias_M, is_row_M, extent, window, RANK, PARTS, H, HEAD_BLOCK, BLOCK_SIZE, SLOT_STRIDE, KEYS, RUN,
            ASSEMBLY, HAS_WINDOW, HAS_SOFTCAP, SHARED, STAGES)
        if SHARED:
            slot, counter = kv_head * slots + tile * parts, counters_ptr + kv_head * slots + tile
            acc_MH, peak_M, sum_M, is_row_M = _joined(
                acc_MH, peak_M, sum_M, is_row_M, values_ptr + slot * ROWS * H, logs_ptr + slot * ROWS, counter,
                part, own_parts, row_M, h_H, ROWS, H, HEAD_BLOCK)
        # fmt: on
        to_M = out_ptr + token_M.to(tl.int64) * out_stride + head_M * X
        _store(to_M, turned_back(acc_MH, RUN), peak_M, sum_M, v_scale, is_row_M, H, X)


@triton.jit
def _tiles(
    cu_seqlens_ptr: tl.tensor, s_S: tl.tensor, S: tl.tensor, TOKENS: tl.constexpr, SKIP_SINGLE: tl.constexpr
) -> tl.tensor:
    """How many tiles each sequence has."""
    start_S = tl.load(cu_seqlens_ptr + s_S, mask=s_S < S, other=0)
    query_len_S = tl.load(cu_seqlens_ptr + s_S + 1, mask=s_S < S, other=0) - start_S
    if SKIP_SINGLE:
        query_len_S = tl.where(query_len_S == 1, 0, query_len_S)
    return tl.cdiv(query_len_S, TOKENS)


@triton.jit
def _share(
    done: tl.tensor, parts: tl.tensor, end: tl.tensor, KEYS: tl.constexpr, SHARED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Which part of a tile's keys, of how many, and their length; beyond the last part there is nothing to do."""
    part, own_parts, share = 0, 1, 0
    if SHARED:
        own_parts = tl.minimum(parts, tl.cdiv(end, LEAST_SHARE))
        share = tl.cdiv(tl.cdiv(end, own_parts), KEYS) * KEYS
        part, own_parts = done % parts, tl.cdiv(end, share)  # rounded up, shares may be fewer
    return part, own_parts, share


@triton.jit
def _joined(
    acc_MH: tl.tensor, peak_M: tl.tensor, sum_M: tl.tensor, is_row_M: tl.tensor, values: tl.tensor, logs: tl.tensor,
    counter: tl.tensor, part: tl.tensor, own_parts: tl.tensor, row_M: tl.tensor, h_H: tl.tensor, ROWS: tl.constexpr,
    H: tl.constexpr, HEAD_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The sums of all parts of a tile and the rows to store, for the program that is the last; others have no rows.

    ``values`` [parts, ROWS, H] and ``logs`` [parts, ROWS] have a slot for each part.
    """
    is_row_M &= part < own_parts
    if (own_parts > 1) & (part < own_parts):
        sums = _left(acc_MH, peak_M, sum_M)
        is_last = leave_part(values, logs, counter, sums, part, own_parts, row_M, h_H, ROWS, H)
        is_row_M &= is_last
        if is_last:
            peak_M, sum_M, acc_MH = add_parts(values, logs, own_parts, h_H, ROWS, H, HEAD_BLOCK, 1)
    return acc_MH, peak_M, sum_M, is_row_M


@triton.jit
def _left(acc_MH: tl.tensor, peak_M: tl.tensor, sum_M: tl.tensor) -> tl.tensor:
    """Sums as ``leave_part`` takes them; rows that see none of these keys have nothing to add."""
    is_empty_M = sum_M == 0
    return tl.where(is_empty_M, float("-inf"), peak_M), tl.where(is_empty_M, 1.0, sum_M), acc_MH


@triton.jit
def _biases(
    bias_ptr: tl.tensor, token_M: tl.tensor, head_M: tl.tensor, GROUP: tl.constexpr, extent: tl.tensor
) -> tl.tensor:
    """Where those of each row and head begin."""
    return bias_ptr + (token_M.to(tl.int64) * (tl.num_programs(0) * GROUP) + head_M) * extent


@triton.jit
def _sinks(
    sinks_M: tl.tensor, is_row_M: tl.tensor, part: tl.tensor, SHARED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest score and the sum of weights before the first key, for the part that has it."""
    sink_M = tl.load(sinks_M, mask=is_row_M, other=0.0)
    peak_M, sum_M = tl.maximum(sink_M * LOG2_E, NO_SCORE), tl.full(sink_M.shape, 1.0, tl.float32)
    if SHARED:
        peak_M, sum_M = tl.where(part == 0, peak_M, NO_SCORE), tl.where(part == 0, sum_M, 0.0)
    return peak_M, sum_M


@triton.jit
def _store(
    to_M: tl.tensor, acc_MH: tl.tensor, peak_M: tl.tensor, sum_M: tl.tensor, v_scale: tl.tensor, is_row_M: tl.tensor,
    H: tl.constexpr, X: tl.constexpr,
) -> None:  # fmt: skip
    """Divide and write a tile's results."""
    h_H = tl.arange(0, acc_MH.shape[1])
    if X > H:
        sum_M = store_log(to_M + H, peak_M, sum_M, is_row_M)
    out_MH = (acc_MH / sum_M[:, None] * v_scale).to(to_M.dtype.element_ty)
    tl.store(to_M[:, None] + h_H[None, :], out_MH, mask=is_row_M[:, None] & (h_H < H)[None, :])


@triton.jit
def _attend(
    q_MH: tl.tensor, peak_M: tl.tensor, sum_M: tl.tensor, position_M: tl.tensor, first_end: tl.tensor, end: tl.tensor,
    begin: tl.tensor, share: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, table_ptr: tl.tensor,
    k_block_stride: tl.tensor, v_block_stride: tl.tensor, scale: tl.tensor, cap_in: tl.tensor, cap_out: tl.tensor,
    slope_M: tl.tensor | None, bias_M: tl.tensor | None, is_row_M: tl.tensor, extent: tl.tensor, window: tl.tensor,
    RANK: tl.constexpr, PARTS: tl.constexpr, H: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr, ASSEMBLY: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Weighted values, largest score and sum of weights, for rows of which the first sees keys to ``first_end``, the
    last to ``end``; with SHARED, of the ``share`` of keys from ``begin`` on, both multiples of KEYS.

    Tiles fully visible to all rows come first, without a mask; with a window there are none.
    """
    position_M = part_count(position_M + 1, RANK, PARTS) - 1
    first_end, end = part_count(first_end, RANK, PARTS), part_count(end, RANK, PARTS)
    seen_from, whole_end, stop = 0, first_end // KEYS * KEYS, end
    if HAS_WINDOW:
        seen_from = tl.maximum(first_end - window, 0)
        begin = seen_from // KEYS * KEYS
        whole_end = begin
    if SHARED:
        stop = tl.minimum(end, begin + share)
        whole_end = tl.maximum(tl.minimum(whole_end, begin + share), begin)
    acc_MH = tl.zeros([q_MH.shape[0], HEAD_BLOCK], tl.float32)
    # fmt: off
    for at in tl.range(begin, whole_end, KEYS, num_stages=STAGES):
        acc_MH, peak_M, sum_M = _fold(
            at, acc_MH, peak_M, sum_M, q_MH, position_M, seen_from, end, k_ptr, v_ptr, table_ptr, k_block_stride,
            v_block_stride, scale, cap_in, cap_out, slope_M, bias_M, is_row_M, extent, window, H, BLOCK_SIZE,
            SLOT_STRIDE, KEYS, RUN, ASSEMBLY,
            HAS_WINDOW, HAS_SOFTCAP, MASKED=False)
    for at in tl.range(whole_end, stop, KEYS, num_stages=STAGES if HAS_WINDOW else 1):
        acc_MH, peak_M, sum_M = _fold(
            at, acc_MH, peak_M, sum_M, q_MH, position_M, seen_from, end, k_ptr, v_ptr, table_ptr, k_block_stride,
            v_block_stride, scale, cap_in, cap_out, slope_M, bias_M, is_row_M, extent, window, H, BLOCK_SIZE,
            SLOT_STRIDE, KEYS, RUN, ASSEMBLY,
            HAS_WINDOW, HAS_SOFTCAP, MASKED=True)
    # fmt: on
    return acc_MH, peak_M, sum_M


@triton.jit
def _fold(
    at: tl.tensor, acc_MH: tl.tensor, peak_M: tl.tensor, sum_M: tl.tensor, q_MH: tl.tensor, position_M: tl.tensor,
    seen_from: tl.tensor, end: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, table_ptr: tl.tensor,
    k_block_stride: tl.tensor, v_block_stride: tl.tensor, scale: tl.tensor, cap_in: tl.tensor,
    cap_out: tl.tensor, slope_M: tl.tensor | None, bias_M: tl.tensor | None, is_row_M: tl.tensor, extent: tl.tensor,
    window: tl.tensor, H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr, ASSEMBLY: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add the tile of keys from ``at`` on to the sums (Milakov and Gimelshein, arXiv 1805.02867)."""
    key_C = at + tl.arange(0, KEYS)
    block_C = key_blocks(table_ptr, at, end, BLOCK_SIZE, KEYS).to(tl.int64)
    dtype: tl.constexpr = q_MH.dtype
    D: tl.constexpr = q_MH.shape[1]
    in_block, slot_C1 = at % BLOCK_SIZE * SLOT_STRIDE, tl.arange(0, KEYS)[:, None] % BLOCK_SIZE
    is_row_C1 = tl.full([KEYS, 1], True, tl.int1)
    # fmt: off
    k_CH, k_unit = load_rows(k_ptr + block_C * k_block_stride + in_block, slot_C1, is_row_C1, SLOT_STRIDE, H, D, RUN,
                             ASSEMBLY)
    if MASKED:  # slots behind the last row's hold anything, also NaN, which a weight of 0 would not undo
        is_row_C1 &= key_C[:, None] < end
    if HAS_WINDOW:  # and so do those before the first row's window
        is_row_C1 &= key_C[:, None] >= seen_from
    v_CH, v_unit = load_rows(v_ptr + block_C * v_block_stride + in_block, slot_C1, is_row_C1, SLOT_STRIDE, H, D, RUN,
                             ASSEMBLY)
    # fmt: on
    scores_MC = tl.dot(q_MH, tl.trans(k_CH.to(dtype)), input_precision="ieee") * k_unit
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores_MC = cap_out - 2 * cap_out / (tl.exp2(scores_MC * cap_in) + 1)
    if slope_M is not None:
        scores_MC -= slope_M[:, None] * (position_M[:, None] - key_C[None, :])
    if bias_M is not None:
        distance_MC = position_M[:, None] - key_C[None, :]
        has_bias_MC = is_row_M[:, None] & (distance_MC >= 0) & (distance_MC < extent)
        bias_MC = tl.load(bias_M[:, None] + distance_MC, mask=has_bias_MC, other=0.0).to(tl.float32)
        scores_MC += bias_MC * (LOG2_E / scale)
    if MASKED:
        is_seen_MC = key_C[None, :] <= position_M[:, None]
        if HAS_WINDOW:
            is_seen_MC = is_seen_MC & (key_C[None, :] > position_M[:, None] - window)
        scores_MC = tl.where(is_seen_MC, scores_MC, float("-inf"))
    top_M = tl.maximum(peak_M, tl.max(scores_MC, 1) * scale)
    weights_MC = tl.exp2(tl.fma(scores_MC, scale, -top_M[:, None]))
    shrink_M = tl.exp2(peak_M - top_M)
    sum_M = sum_M * shrink_M + tl.sum(weights_MC, 1)
    weights_MC *= v_unit
    acc_MH = tl.dot(weights_MC.to(dtype), v_CH.to(dtype), acc_MH * shrink_M[:, None], input_precision="ieee")
    return acc_MH, top_M, sum_M


@triton.jit
def key_blocks(
    table_ptr: tl.tensor, at: tl.tensor, end: tl.tensor, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The block of the tile of keys from ``at`` on; where a tile is larger than a block, that of each key [C, 1]."""
    if KEYS <= BLOCK_SIZE:
        blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < end, other=0)
    else:
        key_C = at + tl.arange(0, KEYS)
        blocks = tl.load(table_ptr + key_C // BLOCK_SIZE, mask=key_C < end, other=0)[:, None]
    return blocks
