"""Attention of sequences that have one row each, over the paged cache.

Shapes: T rows, S sequences, K kv heads, G query heads for each of them, H head dim, W columns of a row.

A program processes a run of tiles of positions of one sequence, for the G query heads of one kv head, so that keys and
values are read once (split-KV: Dao et al., "Flash-Decoding", 2023; sums: Milakov and Gimelshein, arXiv 1805.02867).
The last program of a pair (sequence, kv head) to finish combines the runs, in the order of their positions. All
bounds are read on the device and the host chooses by shapes alone, so that a captured graph serves every length.

With the prologue, query, key and value come from the projection: they are normed and rotated here, and the program of
the last run writes key and value to their slot and puts them into its last tile. A run's last tile is taken first, and
loaded before the wait for the predecessor, since what else it holds is of earlier steps. Rows of 8 and 4 bits
(``cached_rows``) are stored by another kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.collective import WHOLE_CONTEXT, ContextPart
from octavo_kernels.triton.attention.cached_rows import (
    as_words,
    is_packed,
    load_words,
    of_planes,
    planes,
    planes_of,
    row_assembly,
    run_of,
    turned_back,
    words_of,
)
from octavo_kernels.triton.attention.decode_qkv import divided, load_angles, load_heads, load_norm, load_scales, turned
from octavo_kernels.triton.configs.decode_attention import DecodeConfig, config_for
from octavo_kernels.triton.launch import after_predecessor, counters, launch
from octavo_kernels.triton.split_sums import LOG2_E, NO_SCORE, add_parts, leave_part, part_count, store_heads

MAX_HEAD_DIM = 512
MAX_PAIRS = 2**17

_COMBINED_AT_ONCE = 64
"""Partial results that a thread of the combining program holds in registers."""


class Prologue(NamedTuple):
    """Inputs that turn a row of projections into a query, a key and a value."""

    cos_TR: Tensor | None
    sin_TR: Tensor | None
    slot_mapping_T: Tensor


def attend_single_rows(
    q_TNH: Tensor,
    heads: HeadLayout,
    cache: LayerCache,
    rows: PagedRows,
    out_TNX: Tensor,
    part: ContextPart = WHOLE_CONTEXT,
) -> None:
    """Fill the rows of ``out`` that are the only row of their sequence, or every row if ``rows.single`` is given; the
    others are left as they are.

    Queries are rotated, and the step's keys and values stored already.
    """
    run_decode_attention(q_TNH.flatten(1), heads, None, cache, rows, out_TNX.view(len(out_TNX), -1), part=part)


def run_decode_attention(
    x_TW: Tensor,
    heads: HeadLayout,
    prologue: Prologue | None,
    cache: LayerCache,
    rows: PagedRows,
    out_TW: Tensor,
    config: DecodeConfig | None = None,
    part: ContextPart = WHOLE_CONTEXT,
) -> None:
    """Launch the kernel on projections, or on queries where there is no prologue. ``config`` overrides the table's.
    ``out`` has H numbers of a head, or the result of ``ops.partial_attention`` over this part of each context."""
    single = None if prologue else rows.single
    S, K, H = len(rows.seq_lens_S) if single is None else len(x_TW), heads.num_kv_heads, heads.head_dim
    keys, values, block_tables_SB = cache.keys, cache.values, rows.of(cache).block_tables_SB
    assert H <= MAX_HEAD_DIM, f"head_dim {H} is more than {MAX_HEAD_DIM}"
    assert S * K <= MAX_PAIRS, f"{S} sequences of {K} kv heads are more than {MAX_PAIRS} pairs"
    assert keys.stride() == values.stride(), "keys and values must be laid out alike"
    assert prologue is None or not is_packed(keys), "rows of 8 or 4 bits are stored before"
    assert H % planes_of(keys) == 0, f"head_dim {H} is no multiple of the {planes_of(keys)} numbers of a word"
    assert 1 == keys.stride(3) == x_TW.stride(1) == out_TW.stride(1) == block_tables_SB.stride(1)
    if prologue and prologue.cos_TR is not None and prologue.sin_TR is not None:
        assert prologue.cos_TR.stride() == prologue.sin_TR.stride() == (prologue.cos_TR.stride(0), 1)
    if config is None:
        sizes = S * K, heads.num_heads // K, H, x_TW.element_size(), keys.shape[2]
        config = config_for(*sizes, has_long_context=rows.has_long_context)
    constants = _constants(heads, prologue, config, keys, x_TW.dtype, part)
    scale = heads.scale / max(1, constants["RUN"])
    partial_shape = (S, K, config.splits, constants["GP"])
    launch(
        _decode_kernel,
        (config.splits, K, S),
        x_TW,
        *(prologue or (None, None, None)),
        *((heads.q_norm_H, heads.k_norm_H) if prologue else (None, None)),
        keys,
        values,
        *(cache.scales or (None, None)),
        block_tables_SB,
        *((rows.cu_seqlens_q, rows.seq_lens_S) if single is None else single),
        heads.sinks_N,
        *(heads.slopes_N, heads.bias_TNE),
        out_TW,
        torch.empty(*partial_shape, H, dtype=torch.float32, device=x_TW.device),
        torch.empty(partial_shape, dtype=torch.float32, device=x_TW.device),
        counters(x_TW.device, MAX_PAIRS),
        scale / heads.softcap if heads.softcap else scale * LOG2_E.value,
        heads.softcap * LOG2_E.value,
        *(heads.norm_eps, extent_of(heads.bias_TNE), sinks_stride(heads.sinks_N), x_TW.stride(0), out_TW.stride(0)),
        prologue.cos_TR.stride(0) if prologue and prologue.cos_TR is not None else 0,
        block_tables_SB.stride(0),
        keys.stride(0),
        config.splits,
        config.min_tiles,
        BY_ROW=single is not None,
        X=out_TW.shape[1] // heads.num_heads,
        **constants,
    )


def extent_of(bias_TNE: Tensor | None) -> int:
    """How many distances have a bias."""
    if bias_TNE is None:
        return 0
    assert bias_TNE.is_contiguous(), "the biases of a row must lie side by side"
    return bias_TNE.shape[2]


def sinks_stride(sinks_N: Tensor | None) -> int:
    """From the sinks of a row to those of the next one; 0 where all rows have the same."""
    assert sinks_N is None or sinks_N.is_contiguous(), "the sinks of a row must lie side by side"
    return 0 if sinks_N is None or sinks_N.dim() == 1 else sinks_N.shape[1]


def _constants(
    heads: HeadLayout,
    prologue: Prologue | None,
    config: DecodeConfig,
    keys: Tensor,
    dtype: torch.dtype,
    part: ContextPart,
) -> dict[str, Any]:
    """Compile-time constants of the kernel: as few as can be, since each of their values is a kernel to compile."""
    G, H = heads.num_heads // heads.num_kv_heads, heads.head_dim
    padded_G, padded_H = triton.next_power_of_2(G), max(16 * planes_of(keys), triton.next_power_of_2(H))
    dot = config.dot or padded_G >= 16  # Triton turns sums of so many rows' products into a dot of its own, in TF32
    at_once = max(1, _COMBINED_AT_ONCE * 32 * config.warps // (padded_G * padded_H))
    return {
        "RANK": part.rank,
        "PARTS": part.size,
        "K": heads.num_kv_heads,
        "G": G,
        "H": H,
        "R": 0 if prologue is None or prologue.cos_TR is None else prologue.cos_TR.shape[1],
        "GP": padded_G,
        "HP": padded_H,
        "ROWS": max(16, padded_G) if dot else padded_G,
        "WINDOW": heads.window,
        "CAPPED": heads.softcap > 0,
        "PROLOGUE": prologue is not None,
        "TILE": config.tile,
        "SHARES": config.warps if config.by_warp else 1,
        "SPLIT": config.splits > 1,
        "AT_ONCE": min(at_once, triton.next_power_of_2(config.splits)),
        "DOT": dot,
        "STAGES": config.stages,
        "HEAD_STRIDE": keys.stride(1),
        "SLOT_STRIDE": keys.stride(2),
        "BLOCK_SIZE": keys.shape[2],
        "RUN": run_of(keys, H),
        "PLANES": planes_of(keys),
        "ASSEMBLY": row_assembly(keys, dtype),
        "num_warps": config.warps,
        "maxnreg": config.registers,
    }


@triton.jit(do_not_specialize=["table_stride", "max_splits", "min_tiles"])
def _decode_kernel(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, k_scales: tl.tensor, v_scales: tl.tensor, tables: tl.tensor,
    cu_seqlens: tl.tensor, seq_lens: tl.tensor, sinks: tl.tensor, slopes: tl.tensor, biases: tl.tensor, out: tl.tensor,
    parts: tl.tensor, logs: tl.tensor, counters: tl.tensor, scale: tl.tensor, cap: tl.tensor, eps: tl.tensor,
    extent: tl.tensor, sinks_stride: tl.tensor, x_stride: tl.tensor, out_stride: tl.tensor, angle_stride: tl.tensor,
    table_stride: tl.tensor, block_stride: tl.tensor, max_splits: tl.tensor, min_tiles: tl.tensor,
    HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BY_ROW: tl.constexpr,
    RANK: tl.constexpr, PARTS: tl.constexpr, X: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr, GP: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PROLOGUE: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """``GP``, ``HP``: G and H filled up to powers of two, H to 16 numbers a plane; ``ROWS``: the queries of a tile."""
    split, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, g, t = tl.arange(0, HP), tl.arange(0, GP), _places(TILE, SHARES)
    after_predecessor(PDL and not PROLOGUE)  # it stored the step's keys and values
    row, length, own, is_here = _row(seq, cu_seqlens, seq_lens, PROLOGUE, BY_ROW, RANK, PARTS)
    length, seen_from, num_runs, begin, last = _run(length, split, max_splits, min_tiles, RANK, PARTS, WINDOW, TILE)
    is_active, x, tables = split < num_runs, x + row * x_stride, tables + own * table_stride
    end, position = tl.where(is_active, length, 0), last * TILE + t
    at = _tile_start(tables, last, end, block_stride, SLOT_STRIDE, BLOCK_SIZE, TILE, SHARES)
    is_own = tl.expand_dims((position == length - 1) & is_here & PROLOGUE, -1)
    is_stored = tl.expand_dims((position >= seen_from) & (position < end), -1) & ~is_own
    k_cache, v_cache = k_cache + kv_head * HEAD_STRIDE, v_cache + kv_head * HEAD_STRIDE
    k = load_words(k_cache + at, tl.arange(0, TILE // SHARES)[:, None], is_stored, SLOT_STRIDE, H, HP, RUN, PLANES)
    v = load_words(v_cache + at, tl.arange(0, TILE // SHARES)[:, None], is_stored, SLOT_STRIDE, H, HP, RUN, PLANES)
    d_GD, d_TD = tl.broadcast_to(d[None, :], [GP, HP]), tl.broadcast(d, is_own)[0]
    k_scale, v_scale = load_scales(k_scales, v_scales, kv_head)
    q_weights, k_weights = load_norm(q_norm, d_GD, H, R), load_norm(k_norm, d, H, R)
    after_predecessor(PDL and PROLOGUE)
    q_heads = load_heads(x + ((kv_head * G + g) * H)[:, None], (g < G)[:, None] & is_active, d_GD, H, R)
    if PROLOGUE:
        k_head = load_heads(x + (K * G + kv_head) * H, is_active, d, H, R)
        v_own = tl.load(x + (K * G + K + kv_head) * H + d_TD, mask=is_own & (d < H) & is_active, other=0.0)
        q_angles = load_angles(cos, sin, row * angle_stride, is_active, d_GD, R)
        k_angles = load_angles(cos, sin, row * angle_stride, is_active, d, R)
        slot = tl.load(slots + row, mask=is_active, other=-1)
    if not is_active:  # from here on loads are waited for: all of them are on their way
        return
    q = turned(q_heads, q_norm, q_weights, q_angles, eps, H, 1) if PROLOGUE else q_heads[0]
    q, g, scale = _queries(q.to(x.dtype.element_ty), g, scale * k_scale, ROWS, RUN, PLANES, SHARES)
    slope = None if slopes is None else tl.load(slopes + kv_head * G + g, mask=g < G, other=0.0) * LOG2_E
    bias = None if biases is None else biases + (row * (K * G) + kv_head * G + tl.minimum(g, G - 1)) * extent
    sinks = None if sinks is None else sinks + row * sinks_stride
    if PROLOGUE:
        k_own = divided(turned(k_head, k_norm, k_weights, k_angles, eps, H, 0), k_scales, k_scale)
        k, v = _with_own(
            k, v, k_own, divided(v_own, v_scales, v_scale), is_own, split == num_runs - 1, k_cache, v_cache, slot,
            block_stride, SLOT_STRIDE, BLOCK_SIZE, H, PLANES,
        )  # fmt: skip
    peak, total, acc = _walk(
        q, k, v, k_cache, v_cache, tables, begin, last, seen_from, length, scale, cap, slope, bias, extent,
        block_stride, SLOT_STRIDE, BLOCK_SIZE, H, HP, WINDOW, CAPPED, TILE, SHARES, DOT, STAGES, RUN, PLANES, ASSEMBLY,
    )  # fmt: skip
    _finish(
        out + row * out_stride, parts, logs, counters, (peak, total, acc * v_scale), sinks, split, num_runs,
        seq.to(tl.int64) * K + kv_head, kv_head * G, g, d, max_splits, G, GP, H, HP, X, SPLIT, AT_ONCE, RUN,
    )  # fmt: skip


@triton.jit
def _row(
    seq: tl.tensor, cu_seqlens: tl.tensor, seq_lens: tl.tensor, PROLOGUE: tl.constexpr, BY_ROW: tl.constexpr,
    RANK: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sequence's row, the length of its context, which is 0 if it has no row, or several, the sequence, and whether
    the row's own position is in this part of the context.

    With ``BY_ROW``, each row is computed like the only row of a sequence; ``cu_seqlens`` and ``seq_lens`` are then the
    sequence and the position of each row.
    """
    row, own = seq.to(tl.int64), seq.to(tl.int64)
    length = tl.load(seq_lens + seq).to(tl.int32)
    if BY_ROW:
        own = tl.load(cu_seqlens + seq).to(tl.int64)
        length = tl.where(own >= 0, length + 1, 0)
        own = tl.maximum(own, 0)
    elif not PROLOGUE:
        row = tl.load(cu_seqlens + seq).to(tl.int64)
        length = tl.where(tl.load(cu_seqlens + seq + 1) == row + 1, length, 0)
    return row, length, own, (length - 1) % PARTS == RANK


@triton.jit
def _run(
    length: tl.tensor, split: tl.tensor, max_splits: tl.tensor, min_tiles: tl.tensor, RANK: tl.constexpr,
    PARTS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The length of this part of the context, the first visible position, the number of runs, and the first and last
    tile of this program's run."""
    is_row = (length > 0).to(tl.int32)
    length = part_count(length, RANK, PARTS)
    seen_from = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    first = seen_from // TILE
    num_tiles = tl.cdiv(length, TILE) - first
    tiles_each = tl.maximum(tl.cdiv(num_tiles, max_splits), min_tiles)
    begin = first + split * tiles_each
    last = tl.maximum(tl.minimum(begin + tiles_each, first + num_tiles) - 1, begin)  # never before the context
    num_runs = tl.cdiv(num_tiles, tiles_each)
    if PARTS > 1:  # a row that sees no position of this part has a result, too
        num_runs = tl.maximum(num_runs, is_row)
    return length, seen_from, num_runs, begin, last


@triton.jit
def _places(TILE: tl.constexpr, SHARES: tl.constexpr) -> tl.tensor:
    """A tile's positions from its start on. With several ``SHARES``, one for each warp, they are the first axis of this
    and of all tensors of a tile."""
    t = tl.arange(0, TILE // SHARES)
    if SHARES > 1:
        t = tl.arange(0, SHARES)[:, None] * (TILE // SHARES) + t[None, :]
    return t


@triton.jit
def _tile_start(
    tables: tl.tensor, index: tl.tensor, end: tl.tensor, block_stride: tl.tensor, SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the tile of this index, or each share of it, starts in a head's part of the cache; anywhere if that is not
    before the position ``end``. None of them crosses blocks."""
    first = index * TILE
    if SHARES > 1:
        first += tl.arange(0, SHARES)[:, None, None] * (TILE // SHARES)
    block = tl.load(tables + first // BLOCK_SIZE, mask=first < end, other=0)
    return block.to(tl.int64) * block_stride + first % BLOCK_SIZE * SLOT_STRIDE


@triton.jit
def _repeated(q: tl.tensor, g: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Queries as often as fill the rows that tensor cores take, and which of them a row is; the repeated ones are none
    of them, and their results are not stored."""
    GP: tl.constexpr = q.shape[0]
    if ROWS > GP:
        q = tl.reshape(tl.broadcast_to(q[:, None, :], [GP, ROWS // GP, q.shape[1]]), [ROWS, q.shape[1]])
        r = tl.arange(0, ROWS)
        g = tl.where(r % (ROWS // GP) == 0, r // (ROWS // GP), GP)
    return q, g


@triton.jit
def _with_own(
    k: tl.tensor, v: tl.tensor, k_own: tl.tensor, v_own: tl.tensor, is_own: tl.tensor, is_last: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, slot: tl.tensor, block_stride: tl.tensor, SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, H: tl.constexpr, PLANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The words of the last tile with those of the row's own key [D] and value [.., D], which are stored."""
    TYPE: tl.constexpr = k_cache.dtype.element_ty
    key, value = words_of(k_own.to(TYPE), PLANES), words_of(v_own.to(TYPE), PLANES)
    w = tl.arange(0, key.shape[0])
    to = (slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * SLOT_STRIDE) // PLANES + w
    is_word = (w < H // PLANES) & (slot >= 0)
    tl.store(as_words(k_cache, PLANES) + to, key, mask=is_word & is_last)
    tl.store(tl.broadcast(as_words(v_cache, PLANES) + to, is_own)[0], value, mask=is_own & is_word)
    return (tl.where(is_own, key, k[0]), k[1]), (tl.where(is_own, value, v[0]), v[1])


@triton.jit
def _queries(
    q: tl.tensor, g: tl.tensor, scale: tl.tensor, ROWS: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr,
    SHARES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Queries [GP, D] ``_repeated``, and like the numbers of keys, which they are multiplied with: in planes, for each
    share of a tile, and in float16 where those of 8-bit floating-point types are. Which of them a row is, and by what
    products are then to be multiplied."""
    q, g = _repeated(q, g, ROWS)
    R: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    if PLANES == 2 and RUN == 0 and q.dtype != tl.float32:
        q = q.to(tl.float32)
        bits = tl.max(tl.abs(q), 1, keep_dims=True).to(tl.int32, bitcast=True) & 0x7F800000
        size = tl.maximum(bits.to(tl.float32, bitcast=True), 2.0**-100)  # the largest is below twice it
        q, scale = (q / size).to(tl.float16), scale * size
    if PLANES == 1:
        parts: tl.tensor = (q,)
    else:
        parts = tl.split(tl.reshape(q, [R, D // 2, 2]))
        if PLANES == 4:
            first, third = tl.split(tl.reshape(parts[0], [R, D // 4, 2]))
            second, fourth = tl.split(tl.reshape(parts[1], [R, D // 4, 2]))
            parts = first, second, third, fourth
    if SHARES > 1:
        shared: tl.tensor = ()
        for p in tl.static_range(PLANES):
            shared += (tl.broadcast_to(parts[p][None, :, :], [SHARES, R, D // PLANES]),)
        parts = shared
    return parts, g, scale


@triton.jit
def _walk(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, tables: tl.tensor,
    begin: tl.tensor, last: tl.tensor, seen_from: tl.tensor, length: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    slope: tl.tensor, bias: tl.tensor, extent: tl.tensor, block_stride: tl.tensor, SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sums of a run: its last tile, which is loaded, then the others from the first on.

    Tiles come through shared memory, ahead of their use; where one starts is looked up a round before it is asked for.
    """
    t, t_of_share = _places(TILE, SHARES), tl.arange(0, TILE // SHARES)[:, None]
    acc: tl.tensor = ()
    for p in tl.static_range(PLANES):
        acc += (tl.zeros(q[p].shape, tl.float32),)
    peak = tl.sum(acc[0], -1) + NO_SCORE
    sums = peak, tl.zeros_like(peak), acc
    at = _tile_start(tables, begin, last * TILE, block_stride, SLOT_STRIDE, BLOCK_SIZE, TILE, SHARES)
    position = last * TILE + t
    is_seen = (position >= seen_from) & (position < length)
    distance = length - 1 - position
    sums = _attend(
        q, k, v, is_seen, distance, sums, scale, cap, slope, bias, extent, CAPPED, DOT, RUN, PLANES, ASSEMBLY
    )
    for i in tl.range(begin, last, num_stages=STAGES):
        position = i * TILE + t
        is_stored = tl.full(t_of_share.shape, True, tl.int1)
        if WINDOW > 0:  # slots before the window hold arbitrary values
            is_stored = tl.expand_dims(position >= seen_from, -1)
        tile_k = load_words(k_cache + at, t_of_share, is_stored, SLOT_STRIDE, H, HP, RUN, PLANES)
        tile_v = load_words(v_cache + at, t_of_share, is_stored, SLOT_STRIDE, H, HP, RUN, PLANES)
        at = _tile_start(tables, i + 1, last * TILE, block_stride, SLOT_STRIDE, BLOCK_SIZE, TILE, SHARES)
        is_seen, distance = position >= seen_from, length - 1 - position
        sums = _attend(
            q, tile_k, tile_v, is_seen, distance, sums, scale, cap, slope, bias, extent, CAPPED, DOT, RUN, PLANES,
            ASSEMBLY,
        )  # fmt: skip
    peak, total, acc = sums
    if SHARES > 1:
        top = tl.max(peak, 0)
        fade = tl.exp2(peak - top[None, :])
        of_all: tl.tensor = ()
        for p in tl.static_range(PLANES):
            of_all += (tl.sum(acc[p] * fade[:, :, None], 0),)
        peak, total, acc = top, tl.sum(total * fade, 0), of_all
    return peak, total, of_planes(acc)


@triton.jit
def _attend(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, is_seen: tl.tensor, distance: tl.tensor, sums: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, slope: tl.tensor | None, bias: tl.tensor | None, extent: tl.tensor,
    CAPPED: tl.constexpr, DOT: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add a tile to the sums: each query's largest score, its sum of weights, its weighted sum of values."""
    peak, total, acc = sums
    TYPE: tl.constexpr = q[0].dtype
    keys, values = planes(k[0], k[1], RUN, PLANES, TYPE, ASSEMBLY), planes(v[0], v[1], RUN, PLANES, TYPE, ASSEMBLY)
    k_unit, v_unit = 1.0, 1.0
    if RUN == 1:
        k_unit, v_unit = k[1], v[1]
    scores = _scores(q[0], keys[0], None, DOT)
    for p in tl.static_range(1, PLANES):
        scores = _scores(q[p], keys[p], scores, DOT)
    scores *= scale * k_unit
    if CAPPED:
        small = tl.exp2(tl.abs(scores) * (-2 * LOG2_E))
        scores = cap * tl.where(scores < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    if slope is not None:
        scores -= slope[:, None] * tl.expand_dims(distance, -2)
    if bias is not None:
        far = tl.expand_dims(distance, -2)
        has_bias = (far >= 0) & (far < extent)
        scores += tl.load(bias[:, None] + far, mask=has_bias, other=0.0).to(tl.float32) * LOG2_E
    scores = tl.where(tl.expand_dims(is_seen, -2), scores, float("-inf"))
    # Small weights of float16 are not exact, so the largest is 2^15 there.
    higher = tl.maximum(peak, tl.max(scores, -1) - (15.0 if q[0].dtype == tl.float16 else 0.0))
    fade = tl.exp2(peak - higher)
    weights = tl.exp2(scores - tl.expand_dims(higher, -1))
    total = total * fade + tl.sum(weights, -1)
    weights *= v_unit
    fade = tl.expand_dims(fade, -1)
    added: tl.tensor = ()
    for p in tl.static_range(PLANES):
        if DOT:
            added += (tl.dot(weights.to(TYPE), values[p], acc[p] * fade, input_precision="ieee"),)
        else:
            added += (acc[p] * fade + tl.sum(weights[:, :, None] * values[p][None, :, :].to(tl.float32), 1),)
    return higher, total, added


@triton.jit
def _scores(q: tl.tensor, k: tl.tensor, scores: tl.tensor | None, DOT: tl.constexpr) -> tl.tensor:
    """The products of a plane of queries and of keys, and of others."""
    if DOT:
        products = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    else:
        products = tl.sum(q[:, None, :].to(tl.float32) * k[None, :, :].to(tl.float32), 2)
        if scores is not None:
            products += scores
    return products


@triton.jit
def _finish(
    out: tl.tensor, parts: tl.tensor, logs: tl.tensor, counters: tl.tensor, sums: tl.tensor, sinks: tl.tensor,
    split: tl.tensor, num_runs: tl.tensor, pair: tl.tensor, first_head: tl.tensor, g: tl.tensor, d: tl.tensor,
    max_splits: tl.tensor, G: tl.constexpr, GP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, X: tl.constexpr,
    SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, RUN: tl.constexpr,
) -> None:  # fmt: skip
    """Write a pair's result: this run's if it is the only one, or that of all runs if this is the last to finish."""
    if SPLIT and num_runs > 1:
        parts += pair * max_splits * GP * H
        logs += pair * max_splits * GP
        if leave_part(parts, logs, counters + pair, sums, split, num_runs, g, d, GP, H):
            head = tl.arange(0, GP)
            peak, total, acc = add_parts(parts, logs, num_runs, d, GP, H, HP, AT_ONCE)
            store_heads(out, (peak, total, turned_back(acc, RUN)), first_head + head, head < G, d, sinks, H, X)
    else:
        peak, total, acc = sums
        store_heads(out, (peak, total, turned_back(acc, RUN)), first_head + g, g < G, d, sinks, H, X)
