"""The copying warp of ``hopper_prefill``: which tile comes next, and its queries, keys and values to shared memory.

Shapes: S sequences, filled up to a power of two; K kv heads. An item is a tile of rows for one kv head.
"""

from __future__ import annotations

import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def produce(
    q_tiles: gl.tuple, k_tiles: gl.tuple, k_strides: gl.tuple, v_tiles: gl.tensor, v_strides: gl.tuple,
    queries: gl.tuple, plans: gl.tensor, k_rings: gl.tuple, v_ring: gl.tensor, q_full: gl.tensor, k_full: gl.tensor,
    v_full: gl.tensor, q_empty: gl.tensor, k_empty: gl.tensor, v_empty: gl.tensor, tables_ptr: gl.tensor,
    starts_ptr: gl.tensor, ends_ptr: gl.tensor, seq_lens_ptr: gl.tensor, counter_ptr: gl.tensor, S: gl.tensor,
    table_stride: gl.tensor, K: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, SEQUENCES: gl.constexpr,
    SKIP_SINGLE: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Bring the queries of this program's items, and their keys into the rings, one item after the other.

    All programs together increment the counter once per item; the last one resets it.
    """
    QUERY_BYTES: gl.constexpr = num_bytes(queries)
    num_tiles_S, end_tile_S, s_S, num_tiles = _tiles_of(starts_ptr, ends_ptr, S, SEQUENCES, SKIP_SINGLE, TOKENS)
    turn, number, item = 0, 0, gl.program_id(0)
    while item < num_tiles * K:
        asked_before = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        kv_head, s, first, stop, shift = _find_tile(
            item, starts_ptr, ends_ptr, seq_lens_ptr, num_tiles_S, end_tile_S, s_S, num_tiles, K, TOKENS
        )
        for which in gl.static_range(2):
            mbarrier.wait(q_empty.index(which), number & 1 ^ 1)
            tell(plans.index(which), kv_head, first, stop, shift)
            mbarrier.expect(q_full.index(which), QUERY_BYTES)
            at = [first + which * (TOKENS // 2), kv_head * GROUP, 0]
            for part in gl.static_range(len(queries)):
                to = queries[part].index(which)
                tma.async_copy_global_to_shared(q_tiles[part], at, q_full.index(which), to)
        end = shift + gl.minimum(first + TOKENS, stop)
        table_ptr = tables_ptr + s.to(gl.int64) * table_stride
        blocks = _blocks_of(table_ptr, 0, end, PAGE, KEYS)
        for key in range(0, end, KEYS):
            next_blocks = _blocks_of(table_ptr, key + KEYS, end, PAGE, KEYS)
            stage, phase = turn % STAGES, turn // STAGES & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _fetch(k_tiles, k_strides, blocks, kv_head, k_full.index(stage), k_rings, stage)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _fetch((v_tiles,), (v_strides,), blocks, kv_head, v_full.index(stage), (v_ring,), stage)
            blocks = next_blocks
            turn += 1
        if asked_before == num_tiles * K - 1:
            gl.store(counter_ptr, 0)
        item = gl.num_programs(0) + asked_before
        number += 1
    for which in gl.static_range(2):
        mbarrier.wait(q_empty.index(which), number & 1 ^ 1)
        tell(plans.index(which), 0, -1, 0, 0)
        mbarrier.arrive(q_full.index(which))


@gluon.constexpr_function
def num_bytes(parts: tuple[Any, ...]) -> int:
    """Bytes of one of the tiles that each part of shared memory holds."""
    return sum(math.prod(part.shape[1:]) * part.dtype.primitive_bitwidth // 8 for part in parts)


@gluon.jit
def _blocks_of(
    table_ptr: gl.tensor, key: gl.tensor, end: gl.tensor, PAGE: gl.constexpr, KEYS: gl.constexpr
) -> tuple[gl.tensor, ...]:
    """The blocks of the chunk of keys from here on; for those behind the end, the last one."""
    blocks = ()  # type: tuple[gl.tensor, ...]
    for page in gl.static_range(KEYS // PAGE):
        blocks += (gl.load(table_ptr + gl.minimum(key // PAGE + page, (end - 1) // PAGE)),)
    return blocks


@gluon.jit
def _fetch(
    tiles: gl.tuple, strides: gl.tuple, blocks: gl.tuple, kv_head: gl.tensor, full: gl.tensor, rings: gl.tuple,
    stage: gl.tensor,
) -> None:  # fmt: skip
    """Ask for all parts of a head's chunk."""
    BYTES: gl.constexpr = num_bytes(rings)
    mbarrier.expect(full, BYTES)
    for part in gl.static_range(len(rings)):
        _fetch_part(tiles[part], strides[part], blocks, kv_head, full, rings[part], stage)


@gluon.jit
def _fetch_part(
    tiles: gl.tensor, strides: gl.tuple, blocks: gl.tuple, kv_head: gl.tensor, full: gl.tensor, ring: gl.tensor,
    stage: gl.tensor,
) -> None:  # fmt: skip
    """A copy for each page and each ``COLUMNS``; shared memory has all keys' first columns, then their next."""
    PAGES: gl.constexpr = len(blocks)
    WIDTHS: gl.constexpr = ring.shape[2] // tiles.block_shape[1]
    COPIES: gl.constexpr = ring.shape[0] * WIDTHS * PAGES
    copies = ring._reinterpret(ring.dtype, [COPIES, tiles.block_shape[0], tiles.block_shape[1]], tiles.layout)
    for page in gl.static_range(PAGES):
        row = blocks[page] * strides[0] + kv_head * strides[1]
        for width in gl.static_range(WIDTHS):
            to = copies.index((stage * WIDTHS + width) * PAGES + page)
            tma.async_copy_global_to_shared(tiles, [row, width * tiles.block_shape[1]], full, to)


@gluon.jit
def _find_tile(
    item: gl.tensor, starts_ptr: gl.tensor, ends_ptr: gl.tensor, seq_lens_ptr: gl.tensor, num_tiles_S: gl.tensor,
    end_tile_S: gl.tensor, s_S: gl.tensor, num_tiles: gl.tensor, K: gl.constexpr, TOKENS: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """An item's kv head, its sequence, the first token, the one after the sequence's last, and the way from a token to
    its position. Tiles come with the last first, which see most keys.
    """
    tile = num_tiles - 1 - item // K
    s = gl.sum((end_tile_S <= tile).to(gl.int32), 0)
    before = gl.sum(gl.where(s_S < s, num_tiles_S, 0), 0)
    first = gl.load(starts_ptr + s) + (tile - before) * TOKENS
    stop = gl.load(ends_ptr + s)
    return item % K, s, first, stop, gl.load(seq_lens_ptr + s) - stop


@gluon.jit
def _add(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon.jit
def _tiles_of(
    starts_ptr: gl.tensor, ends_ptr: gl.tensor, S: gl.tensor, SEQUENCES: gl.constexpr, SKIP_SINGLE: gl.constexpr,
    TOKENS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Each sequence's tiles, where they end, its number, and the number of all tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [1], [0])
    s_S = gl.arange(0, SEQUENCES, LAYOUT)
    start_S = gl.load(starts_ptr + s_S, mask=s_S < S, other=0)
    query_len_S = gl.load(ends_ptr + s_S, mask=s_S < S, other=0) - start_S
    if SKIP_SINGLE:
        query_len_S = gl.where(query_len_S == 1, 0, query_len_S)
    num_tiles_S = (query_len_S + TOKENS - 1) // TOKENS
    return num_tiles_S, gl.associative_scan(num_tiles_S, 0, _add), s_S, gl.sum(num_tiles_S, 0)


@gluon.jit
def tell(
    plan: gl.tensor, kv_head: gl.tensor, first: gl.tensor, stop: gl.tensor, shift: gl.tensor
) -> None:  # fmt: skip
    """Pass the next item to a group; a negative first token means that there is none."""
    at = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
    plan.store(gl.where(at < 2, gl.where(at == 0, kv_head, first), gl.where(at == 2, stop, shift)))
    gl.thread_barrier()


@gluon.jit
def hear(plan: gl.tensor) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Receive the next item."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 4, LAYOUT)
    fields = plan.load(LAYOUT)
    kv_head, first = gl.sum(gl.where(at == 0, fields, 0), 0), gl.sum(gl.where(at == 1, fields, 0), 0)
    stop, shift = gl.sum(gl.where(at == 2, fields, 0), 0), gl.sum(gl.where(at == 3, fields, 0), 0)
    return kv_head, first, stop, shift
