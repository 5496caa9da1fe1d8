"""Tiles of the rows of prompts, for kernels in Gluon: how many there are, and which is which.

Shapes: S sequences, filled up to a power of two; K kv heads. An item is a tile for one kv head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def find_tile(
    item: gl.tensor, cu_seqlens_ptr: gl.tensor, seq_lens_ptr: gl.tensor, num_tiles_S: gl.tensor, end_tile_S: gl.tensor,
    s_S: gl.tensor, num_tiles: gl.tensor, K: gl.constexpr, TOKENS: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """An item's kv head, its sequence, the first token, the one after the sequence's last, and the way from a token to
    its position. Tiles come with the last first, which see most keys.
    """
    tile = num_tiles - 1 - item // K
    s = gl.sum((end_tile_S <= tile).to(gl.int32), 0)
    before = gl.sum(gl.where(s_S < s, num_tiles_S, 0), 0)
    first = gl.load(cu_seqlens_ptr + s) + (tile - before) * TOKENS
    stop = gl.load(cu_seqlens_ptr + s + 1)
    return item % K, s, first, stop, gl.load(seq_lens_ptr + s) - stop


@gluon.jit
def _add(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon.jit
def tiles_of(
    cu_seqlens_ptr: gl.tensor, S: gl.tensor, SEQUENCES: gl.constexpr, SKIP_SINGLE: gl.constexpr, TOKENS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Each sequence's tiles, where they end, its number, and the number of all tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [1], [0])
    s_S = gl.arange(0, SEQUENCES, LAYOUT)
    start_S = gl.load(cu_seqlens_ptr + s_S, mask=s_S < S, other=0)
    query_len_S = gl.load(cu_seqlens_ptr + s_S + 1, mask=s_S < S, other=0) - start_S
    if SKIP_SINGLE:
        query_len_S = gl.where(query_len_S == 1, 0, query_len_S)
    num_tiles_S = (query_len_S + TOKENS - 1) // TOKENS
    return num_tiles_S, gl.associative_scan(num_tiles_S, 0, _add), s_S, gl.sum(num_tiles_S, 0)
