"""``attention`` in one call, straight from the block table; prefill and decode rows by the same code."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention import HeadLayout, LayerCache, PagedRows, attention
from octavo_kernels.cpu.attention_passes import PART, first_seen
from octavo_kernels.cpu.attention_rows import STEP, prepare_task
from octavo_kernels.cpu.attention_tiles import STATE, TILE, TILE_ROWS, attend_task
from octavo_kernels.cpu.background import in_background
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver, inlined, is_missing
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.tensors import FORMATS, address, declines_floats, whole_vectors
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import LANES

NUMBERS_A_PIECE = 2048
MULTIPLICATIONS_A_PIECE = 50_000
"""One or two microseconds for a single row, which waits for memory."""
PLAN = fields(num_tiles=int, num_slots=int, work=int)


@inlined
def _fits(a: Any, starts: Any, lengths: Any, slots: Any) -> bool:
    """Whether the step's lengths, slots and block numbers stay within its tensors."""
    if starts[0] != 0 or starts[a.S] > a.T:
        return False
    for s in range(a.S):
        blocks = (lengths[s] + a.block_size - 1) // a.block_size
        if not 0 <= starts[s + 1] - starts[s] <= lengths[s] or blocks > a.table_width:
            return False
        table = view(a.tables + 4 * s * a.table_width, a.table_width, np.int32)
        for i in range(blocks):
            if not 0 <= table[i] < a.num_blocks:
                return False
    num_slots = a.num_blocks * a.block_size
    fits = True
    for slot in slots:
        fits &= slot < num_slots
    return fits


@inlined
def _cut(a: Any, starts: Any, lengths: Any, tiles: Any, plan: Any) -> None:
    """Split the step into tiles and count them; they are stored while there is room."""
    tile_tokens, n, slots, work = max(1, TILE_ROWS // (a.N // a.K)), 0, 0, 0
    for s in range(a.S):
        begin, end = starts[s], starts[s + 1]
        is_single = end - begin == 1
        for row in range(begin, end, tile_tokens):
            tokens = min(tile_tokens, end - row)
            start = lengths[s] - end + row
            first_part, last_part = first_seen(a, start) // PART, (start + tokens - 1) // PART + 1
            is_cut = is_single and last_part - first_part > 1
            for i in range(last_part - first_part if is_cut else 1):
                if n < len(tiles):
                    tile = tiles[n]
                    tile.sequence, tile.row, tile.num_tokens, tile.start = s, row, tokens, start
                    tile.first_part, tile.last_part = first_part + i, first_part + i + 1 if is_cut else last_part
                    tile.slot, tile.first_slot = slots if is_cut else -1, slots - i
                    tile.num_slots = last_part - first_part
                n += 1
                slots += is_cut
            work += (start + tokens - first_seen(a, start)) * tokens * a.N * a.H * 2
    plan.num_tiles, plan.num_slots, plan.work = n, slots, work


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, STEP)
        starts, lengths = view(a.starts, a.S + 1, np.int32), view(a.lengths, a.S, np.int32)
        if not _fits(a, starts, lengths, view(a.slots, a.T, np.int64)):
            return 1
        q, plans = np.empty(a.T * a.N * a.width, np.float32), np.empty(1, PLAN)
        a.q = q.ctypes.data
        run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_PIECE // ((a.N + 2 * a.stored) * a.H)))
        plan = plans[0]
        _cut(a, starts, lengths, np.empty(0, TILE), plan)
        tiles = np.empty(plan.num_tiles, TILE)
        parts = np.empty(plan.num_slots * a.N * (STATE + a.width), np.float32)
        counts = np.zeros(plan.num_slots * a.K, np.int64)
        _cut(a, starts, lengths, tiles, plan)
        a.counts = counts.ctypes.data
        a.tiles, a.num_tiles, a.parts = tiles.ctypes.data, plan.num_tiles, parts.ctypes.data
        items = plan.num_tiles * a.K
        run(pool, a.attend, arguments, items, max(1, items * MULTIPLICATIONS_A_PIECE // max(1, plan.work)))
        keep((q, tiles, parts, counts, plans))
        return 0

    return compiled_driver(drive)


def compiling_in_background(kv_dtype: torch.dtype) -> AbstractContextManager[None]:
    """While the block runs, another process compiles the slowest kernels for caches of ``kv_dtype``, if missing."""
    if kv_dtype not in FORMATS or not is_missing(attend_task.__name__):
        return contextlib.nullcontext()
    return in_background(lambda: (attend_task(FORMATS[kv_dtype]), _driver()))


def _check(qkv_TW: Tensor, heads: HeadLayout, cache: LayerCache, slot_mapping_T: Tensor) -> None:
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    shape = cache.keys.shape
    if N % K or qkv_TW.shape[1] != sum(heads.sizes) or shape[1] != K or shape[3] != H or cache.values.shape != shape:
        sizes = f"{N} heads and {K} kv heads of {H}"
        raise ValueError(f"attention: {sizes}, rows of {qkv_TW.shape[1]}, caches {list(shape)}")
    if cache.keys.dtype != cache.values.dtype or cache.keys.dtype not in FORMATS:
        raise ValueError(f"attention: caches of {cache.keys.dtype} and {cache.values.dtype}")
    if not (cache.keys.is_contiguous() and cache.values.is_contiguous()):
        raise ValueError("attention: the caches must be contiguous")
    if len(slot_mapping_T) != len(qkv_TW):
        raise ValueError(f"attention: {len(slot_mapping_T)} slots for {len(qkv_TW)} rows")


@attention.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def attention_numba(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.attention``; the caches must be contiguous, of float32, bfloat16 or float16.

    Raises ``IndexError`` when lengths, slots or block numbers do not fit the tensors.
    """
    slots, tables = rows.of(cache)
    _check(qkv_TW, heads, cache, slots)
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    qkv, T = qkv_TW.float().contiguous(), len(qkv_TW)
    R = 0
    if cos_TR is not None and sin_TR is not None:
        R = cos_TR.shape[1]
        if cos_TR.shape != sin_TR.shape or {cos_TR.dtype, sin_TR.dtype} != {torch.float32} or 2 * R > H:
            raise ValueError(f"attention: cos and sin must be float32 [T, at most {H // 2}]")
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    norms = [None if norm is None else whole_vectors(norm.float()) for norm in (heads.q_norm_H, heads.k_norm_H)]
    ints = tables, rows.cu_seqlens_q, rows.seq_lens_S
    tables, starts, lengths = (x.to(torch.int32).contiguous() for x in ints)
    slots = slots.contiguous()
    out_TW = torch.empty(T, N * H)
    number_format, num_blocks, block_size = FORMATS[cache.keys.dtype], cache.keys.shape[0], cache.keys.shape[2]
    arguments = np.empty(1, STEP)
    arguments[0] = (
        *(prepare_task(number_format), attend_task(number_format)),
        *(qkv.data_ptr(), T, N, K, 0 if heads.shares_cache else K, H, -(-H // LANES) * LANES, heads.scale),
        *(address(norms[0]), address(norms[1]), heads.norm_eps, address(cos_TR), address(sin_TR), R),
        *(slots.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(), num_blocks, block_size),
        *(tables.data_ptr(), tables.shape[1], starts.data_ptr(), lengths.data_ptr(), len(lengths)),
        *(heads.window, heads.softcap, address(heads.sinks_N), out_TW.data_ptr(), *[0] * 5),
    )
    call(_driver(), arguments, "attention: lengths, slots or block numbers do not fit the caches and tables")
    return out_TW.to(qkv_TW.dtype)
