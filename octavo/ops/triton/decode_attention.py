"""Attention of sequences that have one row each, over the paged cache.

Shapes: T rows, S sequences, K kv heads, G query heads for each of them, H head dim, W columns of a row.

A program takes a run of tiles of positions of one sequence, for the G query heads of one kv head, so that keys and
values are read once (split-KV: Dao et al., "Flash-Decoding", 2023; sums: Milakov and Gimelshein, arXiv 1805.02867).
Whichever program of a pair (sequence, kv head) comes last combines the runs, in the order of their positions. All
bounds are read on the device and the host chooses by shapes alone, so that a captured graph serves every length.

With the prologue, query, key and value come from the projection: they are normed and rotated here, and the program of
the last run writes key and value to their slot and puts them into its last tile. That tile is computed last but loaded
first, before the wait for the predecessor: what else it holds is of earlier steps.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.triton.configs.decode_attention import DecodeConfig, config_for
from octavo.ops.triton.launch import after_predecessor, is_invariant, launch

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_HEAD_DIM = 256
MAX_PAIRS = 2**17

_COMBINED_AT_ONCE = 64
"""Partial results that a thread of the combining program holds in registers."""


class Prologue(NamedTuple):
    """What makes a query, a key and a value of a row of projections."""

    cos_TR: Tensor | None
    sin_TR: Tensor | None
    slot_mapping_T: Tensor


def decode_attention(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """``ops.attention`` for steps in which row s is the one row of sequence s."""
    out_TW = qkv_TW.new_empty(qkv_TW.shape[0], heads.sizes[0])
    run_decode_attention(qkv_TW, heads, Prologue(cos_TR, sin_TR, rows.slot_mapping_T), cache, rows, out_TW)
    return out_TW


def attend_single_rows(q_TNH: Tensor, heads: HeadLayout, cache: LayerCache, rows: PagedRows, out_TNH: Tensor) -> None:
    """Fill the rows of ``out`` that are the only row of their sequence; the others are left as they are.

    Queries are rotated, and the step's keys and values stored already.
    """
    run_decode_attention(q_TNH.flatten(1), heads, None, cache, rows, out_TNH.flatten(1))


def run_decode_attention(
    x_TW: Tensor,
    heads: HeadLayout,
    prologue: Prologue | None,
    cache: LayerCache,
    rows: PagedRows,
    out_TW: Tensor,
    config: DecodeConfig | None = None,
) -> None:
    """Launch the kernel on projections, or on queries where there is no prologue. ``config`` overrides the table's."""
    S, K, H = len(rows.seq_lens_S), heads.num_kv_heads, heads.head_dim
    keys, values = cache
    assert H <= MAX_HEAD_DIM, f"head_dim {H} is more than {MAX_HEAD_DIM}"
    assert S * K <= MAX_PAIRS, f"{S} sequences of {K} kv heads are more than {MAX_PAIRS} pairs"
    assert keys.stride() == values.stride(), "keys and values must be laid out alike"
    assert 1 == keys.stride(3) == x_TW.stride(1) == out_TW.stride(1) == rows.block_tables_SB.stride(1)
    if config is None:
        config = config_for(S * K, H * x_TW.element_size(), keys.shape[2], is_invariant())
    constants = _constants(heads, prologue, config)
    partial_shape = (S, K, config.splits, constants["GP"])
    launch(
        _decode_kernel,
        (config.splits, K, S),
        x_TW,
        *(prologue or (None, None, None)),
        *((heads.q_norm_H, heads.k_norm_H) if prologue else (None, None)),
        keys,
        values,
        rows.block_tables_SB,
        rows.cu_seqlens_q,
        rows.seq_lens_S,
        heads.sinks_N,
        out_TW,
        torch.empty(*partial_shape, H, dtype=torch.float32, device=x_TW.device),
        torch.empty(partial_shape, dtype=torch.float32, device=x_TW.device),
        _counters(x_TW.device),
        heads.scale / heads.softcap if heads.softcap else heads.scale * LOG2_E.value,
        heads.softcap * LOG2_E.value,
        heads.norm_eps,
        x_TW.stride(0),
        out_TW.stride(0),
        rows.block_tables_SB.stride(0),
        keys.stride(0),
        HEAD_STRIDE=keys.stride(1),
        SLOT_STRIDE=keys.stride(2),
        BLOCK_SIZE=keys.shape[2],
        **constants,
    )


def _constants(heads: HeadLayout, prologue: Prologue | None, config: DecodeConfig) -> dict[str, Any]:
    """What the kernel is compiled for."""
    G, H = heads.num_heads // heads.num_kv_heads, heads.head_dim
    padded_G, padded_H = triton.next_power_of_2(G), triton.next_power_of_2(H)
    chunk = max(1, _COMBINED_AT_ONCE * 32 * config.warps // (padded_G * padded_H))
    return {
        "K": heads.num_kv_heads,
        "G": G,
        "H": H,
        "R": 0 if prologue is None or prologue.cos_TR is None else prologue.cos_TR.shape[1],
        "GP": padded_G,
        "HP": padded_H,
        "ROWS": max(16, padded_G) if config.dot else padded_G,
        "WINDOW": heads.window,
        "CAPPED": heads.softcap > 0,
        "NUM_OWN": int(prologue is not None),
        "TILE": config.tile,
        "SPLITS": config.splits,
        "MIN_TILES": config.min_tiles,
        "CHUNK": min(chunk, triton.next_power_of_2(config.splits)),
        "STAGES": config.stages,
        "DOT": config.dot,
        "num_warps": config.warps,
    }


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """How many programs of each pair have come: zero between launches. Kept for good, as captured graphs hold it."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "attention must have run once before it is captured in a graph"
    return torch.zeros(MAX_PAIRS, dtype=torch.int32, device=device)


@triton.jit
def _decode_kernel(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, tables: tl.tensor,
    cu_seqlens: tl.tensor, seq_lens: tl.tensor, sinks: tl.tensor, out: tl.tensor, partials: tl.tensor, lses: tl.tensor, counters: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, eps: tl.tensor, x_stride: tl.tensor, out_stride: tl.tensor, table_stride: tl.tensor, block_stride: tl.tensor,
    HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, GP: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, NUM_OWN: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """NUM_OWN: rows that come from the projection, 1 with the prologue. GP, HP: G and H filled up to powers of two; ROWS: queries of a tile. ``cap`` and ``lses`` are in base 2."""
    split, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, length = seq.to(tl.int64), tl.load(seq_lens + seq)
    if not NUM_OWN:
        after_predecessor(PDL)  # it stored the step's keys and values
        row = tl.load(cu_seqlens + seq).to(tl.int64)
        length = tl.where(tl.load(cu_seqlens + seq + 1) == row + 1, length, 0)
    seen_from, num_runs, begin, last = _run(length, split, WINDOW, TILE, SPLITS, MIN_TILES)

    d, t, r = tl.arange(0, HP), tl.arange(0, TILE), tl.arange(0, ROWS)
    k_cache += kv_head * HEAD_STRIDE
    v_cache += kv_head * HEAD_STRIDE
    tables += seq.to(tl.int64) * table_stride
    tile = t[:, None] * SLOT_STRIDE + d[None, :]
    position = last * TILE + t
    is_seen = (position >= seen_from) & (position < length)
    is_stored = (is_seen & (position < length - NUM_OWN) & (split < num_runs))[:, None] & (d < H)[None, :]
    at = _tile_start(tables, last, split < num_runs, block_stride, SLOT_STRIDE, BLOCK_SIZE, TILE)
    k_last = tl.load(k_cache + at + tile, mask=is_stored, other=0.0)
    v_last = tl.load(v_cache + at + tile, mask=is_stored, other=0.0)
    q_weights = _load_norm(q_norm, d, H, R)
    k_weights = _load_norm(k_norm, d, H, R)
    if NUM_OWN:
        after_predecessor(PDL)
    if split >= num_runs:
        return

    x += row * x_stride
    q_heads = kv_head * G + r
    if NUM_OWN:
        q = _load_turned(x, q_heads, r < G, d, q_norm, q_weights, cos, sin, row, eps, H, R)
        k_head = K * G + kv_head + tl.arange(0, 1)
        k_own = _load_turned(x, k_head, k_head >= 0, d, k_norm, k_weights, cos, sin, row, eps, H, R)
        v_own = _load_heads(x, k_head + K, k_head >= 0, d, H)
        slot, is_last = tl.load(slots + row), split == num_runs - 1
        to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * SLOT_STRIDE + d[None, :]
        k_last = _put_own(k_last, k_own, position == length - 1, k_cache + to, (d < H) & (slot >= 0) & is_last)
        v_last = _put_own(v_last, v_own, position == length - 1, v_cache + to, (d < H) & (slot >= 0) & is_last)
    else:
        q = _load_heads(x, q_heads, r < G, d, H)
    q = q.to(x.dtype.element_ty)

    sums = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HP], tl.float32)
    for i in tl.range(begin, last, num_stages=STAGES):
        at = _tile_start(tables, i, True, block_stride, SLOT_STRIDE, BLOCK_SIZE, TILE)
        is_inside = i * TILE + t >= seen_from
        if WINDOW > 0 or H < HP:
            k = tl.load(k_cache + at + tile, mask=is_inside[:, None] & (d < H)[None, :], other=0.0)
            v = tl.load(v_cache + at + tile, mask=is_inside[:, None] & (d < H)[None, :], other=0.0)
        else:
            k = tl.load(k_cache + at + tile)
            v = tl.load(v_cache + at + tile)
        sums = _attend(q, k, v, is_inside, sums, scale, cap, WINDOW > 0, CAPPED, DOT)
    sums = _attend(q, k_last, v_last, is_seen, sums, scale, cap, True, CAPPED, DOT)

    out += row * out_stride
    pair = seq.to(tl.int64) * K + kv_head
    lses += pair * SPLITS * GP
    partials += pair * SPLITS * GP * H
    heads = kv_head * G + tl.arange(0, GP)
    if SPLITS == 1:
        _store(out, sums, q_heads, r < G, d, sinks, H)
    elif num_runs == 1:
        _store(out, sums, q_heads, r < G, d, sinks, H)
    elif _put_partial(partials, lses, counters + pair, sums, split, num_runs, r, d, GP, H):
        _store(
            out, _combine(partials, lses, num_runs, d, GP, H, HP, CHUNK), heads, heads < kv_head * G + G, d, sinks, H
        )


@triton.jit
def _run(
    length: tl.tensor, split: tl.tensor, WINDOW: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first position that is seen, the number of runs, and the first and last tile of this program's run."""
    seen_from = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    first = seen_from // TILE
    num_tiles = tl.cdiv(length, TILE) - first
    tiles_each = tl.maximum(tl.cdiv(num_tiles, SPLITS), MIN_TILES)
    begin = first + split * tiles_each
    last = tl.minimum(begin + tiles_each, first + num_tiles) - 1
    return seen_from, tl.cdiv(num_tiles, tiles_each), begin, last


@triton.jit
def _tile_start(
    tables: tl.tensor, index: tl.tensor, is_tile: tl.tensor, block_stride: tl.tensor, SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the tile of this index starts in a head's part of the cache; tiles do not cross blocks."""
    block = tl.load(tables + index * TILE // BLOCK_SIZE, mask=is_tile, other=0)
    return block.to(tl.int64) * block_stride + index * TILE % BLOCK_SIZE * SLOT_STRIDE


@triton.jit
def _load_heads(x: tl.tensor, head: tl.tensor, is_head: tl.tensor, d: tl.tensor, H: tl.constexpr) -> tl.tensor:
    """Heads of a row [heads, HP], zero where there is none."""
    return tl.load(x + (head * H)[:, None] + d[None, :], mask=is_head[:, None] & (d < H)[None, :], other=0.0)


@triton.jit
def _load_norm(weight: tl.tensor, d: tl.tensor, H: tl.constexpr, R: tl.constexpr) -> tl.tensor:
    """A norm's weights for the elements of a head, and for those that they are turned with."""
    pair = tl.where(d < R, d + R, d - R)
    if weight is None:
        own, other = 1.0, 1.0
    else:
        own = tl.load(weight + d, mask=d < H, other=0.0).to(tl.float32)[None, :]
        other = tl.load(weight + pair, mask=d < 2 * R, other=0.0).to(tl.float32)[None, :]
    return own, other


@triton.jit
def _load_turned(
    x: tl.tensor, head: tl.tensor, is_head: tl.tensor, d: tl.tensor, norm: tl.tensor, weights: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, row: tl.tensor, eps: tl.tensor, H: tl.constexpr, R: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Heads of a row, normed and rotated: float32 [heads, HP], zero where there is none."""
    values = _load_heads(x, head, is_head, d, H).to(tl.float32)
    factor = 1.0
    if norm is not None:
        factor = tl.rsqrt(tl.sum(values * values, 1) / H + eps)[:, None]
        values *= factor * weights[0]
    if R > 0:
        pair = tl.where(d < R, d + R, d - R)
        angle = row * R + tl.where(d < R, d, d - R)
        is_turned = d < 2 * R
        at = x + (head * H)[:, None] + pair[None, :]
        others = tl.load(at, mask=is_head[:, None] & is_turned[None, :], other=0.0).to(tl.float32)
        cosine = tl.load(cos + angle, mask=is_turned, other=1.0)[None, :]
        sine = tl.load(sin + angle, mask=is_turned, other=0.0)[None, :]
        values = values * cosine + others * (factor * weights[1]) * tl.where((d < R)[None, :], -sine, sine)
    return values


@triton.jit
def _put_own(tile: tl.tensor, own: tl.tensor, is_own: tl.tensor, to: tl.tensor, is_written: tl.tensor) -> tl.tensor:
    """Write the row's own key or value [1, HP] to its slot, and put it into the tile, as it is stored."""
    own = own.to(tile.dtype)
    tl.store(to, own, mask=is_written[None, :])
    return tl.where(is_own[:, None], own, tile)


@triton.jit
def _attend(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, is_seen: tl.tensor, sums: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, DOT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One tile more in the sums: each query's largest score, its sum of weights, its weighted sum of values."""
    peak, total, acc = sums
    k, v = k.to(q.dtype), v.to(q.dtype)
    if DOT:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        scores = tl.sum(q[:, None, :].to(tl.float32) * k[None, :, :].to(tl.float32), 2)
    scores *= scale
    if CAPPED:
        small = tl.exp2(-2 * LOG2_E * tl.abs(scores))
        scores = cap * tl.where(scores < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    if MASKED:
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    fade = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, 1)
    if DOT:
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    else:
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * v[None, :, :].to(tl.float32), 1)
    return higher, total, acc


@triton.jit
def _put_partial(
    partials: tl.tensor, lses: tl.tensor, counter: tl.tensor, sums: tl.tensor, split: tl.tensor, num_runs: tl.tensor,
    r: tl.tensor, d: tl.tensor, GP: tl.constexpr, H: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Leave this run's result for the program that comes last; true if it is this one."""
    peak, total, acc = sums
    row = split * GP + r
    tl.store(lses + row, peak + tl.log2(total), mask=r < GP)
    is_value = (r < GP)[:, None] & (d < H)[None, :]
    tl.store(partials + (row * H)[:, None] + d[None, :], acc / total[:, None], mask=is_value)
    tl.debug_barrier()  # all threads have stored before one of them releases
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_runs - 1
    tl.store(counter, 0, mask=is_last)
    return is_last


@triton.jit
def _combine(
    partials: tl.tensor, lses: tl.tensor, num_runs: tl.tensor, d: tl.tensor, GP: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sums of all runs of a pair, for GP queries."""
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, HP], tl.float32)
    for begin in range(0, num_runs, CHUNK):
        run = begin + tl.arange(0, CHUNK)
        row = run[:, None] * GP + tl.arange(0, GP)[None, :]
        is_run = (run < num_runs)[:, None]
        is_value = is_run[:, :, None] & (d < H)[None, None, :]
        at = partials + row[:, :, None] * H + d[None, None, :]
        lse = tl.load(lses + row, mask=is_run, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(at, mask=is_value, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(lse, 0))
        fade = tl.exp2(peak - higher)
        weights = tl.exp2(lse - higher[None, :])
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * values, 0)
        peak = higher
    return peak, total, acc


@triton.jit
def _store(
    out: tl.tensor, sums: tl.tensor, head: tl.tensor, is_head: tl.tensor, d: tl.tensor, sinks: tl.tensor,
    H: tl.constexpr,
) -> None:  # fmt: skip
    """Write the heads' results; a sink is one more weight in the sum of weights."""
    peak, total, acc = sums
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_head, other=0.0) * LOG2_E
        total += tl.exp2(sink - peak)
    at = out + (head * H)[:, None] + d[None, :]
    tl.store(at, acc / total[:, None], mask=is_head[:, None] & (d < H)[None, :])
