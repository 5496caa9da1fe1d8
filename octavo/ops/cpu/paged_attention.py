"""``paged_attention`` straight from the block table, prefill and decode rows by the same code.

The work is cut into tiles: one kv head of one sequence, with all the query heads that share it, for a few
neighbouring tokens. A tile makes three passes over float32 scratch memory::

    scores     for each run of keys, at most 64 in one block: every row's dot products with them
    weights    for each row: e ** (score - largest) up to its own position, and their sum
    output     for each run of values: every row's weighted sum goes on; at the end divided by its sum

No pass lets a row's arithmetic depend on which rows share its tile, so chunks may be cut anywhere. Runs of a
16-bit cache, or of a head that is not whole vectors, are first copied out as float32 rows of whole vectors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.cpu.attention_dots import MAX_ROWS, exponentials, gather, score
from octavo.ops.cpu.compiled import compiled, compiled_task, inlined
from octavo.ops.cpu.half import bfloat16_value, float16_value
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.tensors import FORMATS, by_token, declines_floats
from octavo.ops.cpu.threads import pool_address, run
from octavo.ops.cpu.vector_ir import BFLOAT16, FLOAT32, LANES
from octavo.ops.paged_attention import paged_attention

RUN = 64
"""Most positions at a time: their float32 keys stay in the first-level cache at usual head sizes."""
TILE_ROWS = 24
"""Rows of a tile, at least the query heads of one token."""
MULTIPLICATIONS_A_CHUNK = 400_000

STEP = fields(
    q=int,
    q_stride=int,
    k_cache=int,
    v_cache=int,
    out=int,
    tables=int,
    table_width=int,
    tiles=int,
    num_tiles=int,
    N=int,
    K=int,
    block_size=int,
    H=int,
    scale=float,
)
TILE = fields(sequence=int, row=int, num_tokens=int, start=int)
"""``num_tokens`` rows of q from ``row``, the first of which sits at position ``start`` of its sequence."""


@inlined
def _run_length(begin: int, end: int, block_size: int) -> Any:
    """Positions from ``begin`` on that are in one block and not more than a run."""
    return min(end - begin, block_size - begin % block_size, RUN)


@inlined
def _run_rows(a: Any, number_format: int, cache: int, head: int, table: Any, begin: int, count: int, copy: Any) -> Any:
    """Address of ``count`` float32 rows of a cache from position ``begin``, in ``copy`` if need be."""
    first = ((table[begin // a.block_size] * a.K + head) * a.block_size + begin % a.block_size) * a.H
    if number_format == FLOAT32 and a.H % LANES == 0:
        return cache + 4 * first
    for j in range(count):
        row = cache + (4 if number_format == FLOAT32 else 2) * (first + j * a.H)
        if number_format == FLOAT32:
            floats = view(row, a.H, np.float32)
            for i in range(a.H):
                copy[j, i] = floats[i]
        else:
            halves = view(row, a.H, np.uint16)
            for i in range(a.H):
                copy[j, i] = bfloat16_value(halves[i]) if number_format == BFLOAT16 else float16_value(halves[i])
    return copy.ctypes.data


@inlined
def _score_rows(a: Any, number_format: int, tile: Any, head: int, queries: Any, scores: Any, copy: Any) -> None:
    """First pass: ``scores[row, position]``, for each row up to its own position (and some that mean nothing)."""
    table, group = view(a.tables + 4 * tile.sequence * a.table_width, a.table_width, np.int32), a.N // a.K
    width, end, begin = queries.shape[1], tile.start + tile.num_tokens, 0
    while begin < end:
        count = _run_length(begin, end, a.block_size)
        keys = _run_rows(a, number_format, a.k_cache, head, table, begin, count, copy)
        in_block = a.block_size - begin % a.block_size
        for row in range(len(queries)):
            visible = min(count, tile.start + row // group + 1 - begin)
            query, out = queries[row].ctypes.data, scores[row].ctypes.data + 4 * begin
            j = 0
            while j < visible:
                n = LANES if j + LANES <= in_block else 1
                score(query, keys + 4 * width * j, width // LANES, out + 4 * j, n)
                j += n
        begin += count


@inlined
def _gather_rows(a: Any, number_format: int, tile: Any, head: int, scores: Any, outputs: Any, copy: Any) -> None:
    """Third pass: ``outputs[row]`` += weights * values, some rows at a time over the positions that all of them see."""
    table, group = view(a.tables + 4 * tile.sequence * a.table_width, a.table_width, np.int32), a.N // a.K
    width, stride, num_rows = outputs.shape[1], 4 * scores.shape[1], len(outputs)
    end, begin = tile.start + tile.num_tokens, 0
    while begin < end:
        count = _run_length(begin, end, a.block_size)
        values = _run_rows(a, number_format, a.v_cache, head, table, begin, count, copy)
        for first in range(0, num_rows, MAX_ROWS):
            n = min(MAX_ROWS, num_rows - first)
            shared = max(0, min(count, tile.start + first // group + 1 - begin))
            weights = scores[first].ctypes.data + 4 * begin
            gather(weights, stride, values, width // LANES, shared, outputs[first].ctypes.data, n)
            for row in range(first, first + n):
                more = min(count, tile.start + row // group + 1 - begin) - shared
                if more > 0:
                    weights, rest = scores[row].ctypes.data + 4 * (begin + shared), values + 4 * width * shared
                    gather(weights, stride, rest, width // LANES, more, outputs[row].ctypes.data, 1)
        begin += count


@functools.cache
def _task(number_format: int) -> int:
    """Task over (tile, kv head), the last tiles first: they see the most positions."""

    def attend(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, STEP)
        group, width = a.N // a.K, (a.H + LANES - 1) // LANES * LANES
        copy = np.zeros((RUN, width), np.float32)
        for item in range(begin, end):
            tile = view(a.tiles, a.num_tiles, TILE)[a.num_tiles - 1 - item // a.K]
            head, num_rows = item % a.K, tile.num_tokens * group
            positions = (tile.start + tile.num_tokens + LANES - 1) // LANES * LANES
            queries, outputs = np.zeros((num_rows, width), np.float32), np.zeros((num_rows, width), np.float32)
            scores = np.empty((num_rows, positions + LANES), np.float32)
            for row in range(num_rows):
                at = (tile.row + row // group) * a.q_stride + (head * group + row % group) * a.H
                q = view(a.q + 4 * at, a.H, np.float32)
                for i in range(a.H):
                    queries[row, i] = q[i] * np.float32(a.scale)
            _score_rows(a, number_format, tile, head, queries, scores, copy)
            sums = np.empty(num_rows, np.float32)
            for row in range(num_rows):
                seen = tile.start + row // group + 1
                vectors = (seen + LANES - 1) // LANES
                scores[row, seen : vectors * LANES] = -np.inf
                sums[row] = exponentials(scores[row].ctypes.data, vectors)
            _gather_rows(a, number_format, tile, head, scores, outputs, copy)
            for row in range(num_rows):
                at = ((tile.row + row // group) * a.N + head * group + row % group) * a.H
                out = view(a.out + 4 * at, a.H, np.float32)
                for i in range(a.H):
                    out[i] = outputs[row, i] / sums[row]
            keep((queries, outputs, scores, copy))

    return compiled_task(attend)


@inlined
def _fits(a: Any, num_blocks: int, num_tokens: int, starts: Any, lengths: Any) -> bool:
    """Whether the step's numbers stay within its tensors."""
    if starts[0] != 0 or starts[lengths.size] != num_tokens:
        return False
    for s in range(lengths.size):
        blocks = (lengths[s] + a.block_size - 1) // a.block_size
        if not 0 <= starts[s + 1] - starts[s] <= lengths[s] or blocks > a.table_width:
            return False
        table = view(a.tables + 4 * s * a.table_width, a.table_width, np.int32)
        for i in range(blocks):
            if not 0 <= table[i] < num_blocks:
                return False
    return True


@compiled
def _attend_all(
    pool: int, task: int, step: Any, num_blocks: int, num_tokens: int, starts_at: int, lengths_at: int, S: int
) -> bool:
    """Cut the step into tiles and compute them; False, and nothing computed, when it does not fit its tensors."""
    a = step[0]
    starts, lengths = view(starts_at, S + 1, np.int32), view(lengths_at, S, np.int32)
    if not _fits(a, num_blocks, num_tokens, starts, lengths):
        return False
    tile_tokens = max(1, TILE_ROWS // (a.N // a.K))
    tiles, n, work = np.empty(num_tokens, TILE), 0, 0
    for s in range(S):
        for row in range(starts[s], starts[s + 1], tile_tokens):
            tile = tiles[n]
            tile.sequence, tile.row, tile.num_tokens = s, row, min(tile_tokens, starts[s + 1] - row)
            tile.start = lengths[s] - starts[s + 1] + row
            work += (tile.start + tile.num_tokens) * tile.num_tokens * a.N * a.H * 2
            n += 1
    a.tiles, a.num_tiles = tiles.ctypes.data, n
    items = n * a.K
    run(pool, task, step.ctypes.data, items, max(1, items * MULTIPLICATIONS_A_CHUNK // max(1, work)))
    keep((tiles, step))
    return True


@paged_attention.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def paged_attention_numba(
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
) -> Tensor:
    """See ``ops.paged_attention``; the caches must be contiguous, of float32, bfloat16 or float16.

    Windows, soft caps and sinks are left to the reference. Raises ``IndexError`` when lengths or block numbers do
    not fit the tensors.
    """
    if window or softcap or sinks_N is not None:
        rows = (block_tables_SB, cu_seqlens_q, seq_lens_S)
        return paged_attention.reference(q_TNH, k_cache, v_cache, *rows, scale, window, softcap, sinks_N)
    (T, N, H), (num_blocks, K, block_size, H_cache) = q_TNH.shape, k_cache.shape
    if H_cache != H or N % K or v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"paged_attention: {N} heads of {H}, caches {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("paged_attention: the caches must be contiguous")
    q = by_token(q_TNH)
    tables, starts, lengths = (x.to(torch.int32).contiguous() for x in (block_tables_SB, cu_seqlens_q, seq_lens_S))
    out_TNH = torch.empty(T, N, H)
    step = np.zeros(1, STEP)
    addresses = (k_cache.data_ptr(), v_cache.data_ptr(), out_TNH.data_ptr(), tables.data_ptr())
    step[0] = (q.data_ptr(), q.stride(0), *addresses, tables.shape[1], 0, 0, N, K, block_size, H, scale)
    task = _task(FORMATS[k_cache.dtype])
    S = len(lengths)
    if not _attend_all(pool_address(), task, step, num_blocks, T, starts.data_ptr(), lengths.data_ptr(), S):
        raise IndexError("paged_attention: lengths or block numbers do not fit the caches and tables")
    return out_TNH.to(q_TNH.dtype)
