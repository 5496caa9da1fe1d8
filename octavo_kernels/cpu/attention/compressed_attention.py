"""``compressed_attention`` and ``choose_entries`` for CPUs, in float32: a row's bits depend on no other row.

A thread takes one row and some of its heads, or one row: it copies the keys that the row sees to rows of whole vectors,
which its heads then read one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.attention.compressed_attention import choose_entries, compressed_attention
from octavo_kernels.cpu.attention.attention_dots import gather, score_one
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import inlined, rarely_used, task
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.rows.columns import declines
from octavo_kernels.cpu.tensors import address, whole_vectors
from octavo_kernels.cpu.vector_ir import FLOAT32, LANES

HEADS_A_PIECE = 16
CACHE = "{0} {0}_width {0}_slots {0}_tables {0}_blocks"
"""A cache of rows of some width, that many in a block, and the block table of each sequence."""
ATTENTION = fields(
    "task items piece q seqs positions N H width pieces window scale:float sinks block_size rate chosen count out",
    *(CACHE.format(name) for name in ("keys", "entries")),
)
INDEX = fields(
    "task items piece q weights seqs positions J I width block_size rate count chosen", CACHE.format("entries")
)


@inlined
def _copy_row(cache: int, row_width: int, slots: int, place: int, slot: int, first: int, out: Any, size: int) -> None:
    """Copy ``size`` numbers from ``first`` on of a row of a cache; those of ``out`` behind them stay."""
    source = view(cache + 4 * ((place * slots + slot) * row_width + first), size, np.float32)
    for i in range(size):
        out[i] = source[i]


@inlined
def _copy_entry(a: Any, s: int, entry: int, first: int, out: Any, size: int) -> None:
    """Copy numbers of an entry of sequence s."""
    end = (entry + 1) * a.rate - 1
    place = view(a.entries_tables + 4 * s * a.entries_blocks, a.entries_blocks, np.int32)[end // a.block_size]
    slot = end % a.block_size // a.rate
    _copy_row(a.entries, a.entries_width, a.entries_slots, place, slot, first, out, size)


@inlined
def _copy_seen(a: Any, t: int, keys: Any) -> int:
    """Copy the keys that row t sees: those of its window, then entries; returns their number."""
    s, position = view(a.seqs, t + 1, np.int64)[t], view(a.positions, t + 1, np.int64)[t]
    table = view(a.keys_tables + 4 * s * a.keys_blocks, a.keys_blocks, np.int32)
    first, n = max(0, position - a.window + 1), 0
    for p in range(first, position + 1):
        _copy_row(a.keys, a.keys_width, a.keys_slots, table[p // a.block_size], p % a.block_size, 0, keys[n], a.H)
        n += 1
    if not a.rate:
        return n
    chosen = view(a.chosen + 4 * t * a.count, a.count, np.int32)
    for i in range(a.count if a.chosen else (position + 1) // a.rate):
        entry = chosen[i] if a.chosen else i
        if entry < 0:
            break
        _copy_entry(a, s, entry, 0, keys[n], a.H)
        n += 1
    return n


@rarely_used
@task
def _attend_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows and pieces of their heads."""
    a = read(arguments, ATTENTION)
    own, sinks = np.zeros(a.width, np.float32), view(a.sinks, a.N, np.float32)
    for item in range(begin, end):
        t, piece = item // a.pieces, item % a.pieces
        position = view(a.positions, t + 1, np.int64)[t]
        entries = 0 if not a.rate else a.count if a.chosen else (position + 1) // a.rate
        keys = np.zeros((min(position + 1, a.window) + entries, a.width), np.float32)
        n = _copy_seen(a, t, keys)
        scores, num_steps = np.empty(n, np.float32), a.width // LANES
        for head in range(piece * HEADS_A_PIECE, min(a.N, (piece + 1) * HEADS_A_PIECE)):
            q, largest = a.q + 4 * (t * a.N + head) * a.width, sinks[head] if a.sinks else np.float32(-np.inf)
            for i in range(n):
                score_one(FLOAT32, q, keys[i].ctypes.data, num_steps, scores[i:].ctypes.data)
                scores[i] *= np.float32(a.scale)
                largest = max(largest, scores[i])
            total = np.exp(sinks[head] - largest) if a.sinks else np.float32(0)
            for i in range(n):
                scores[i] = np.exp(scores[i] - largest)
                total += scores[i]
            for i in range(n):
                scores[i] /= total
            own[:] = 0
            gather(
                FLOAT32, 0, scores.ctypes.data, 0, keys.ctypes.data, num_steps, n, own.ctypes.data, 4 * a.width, 1, 0
            )
            out = view(a.out + 4 * (t * a.N + head) * a.H, a.H, np.float32)
            for i in range(a.H):
                out[i] = own[i]
        keep((keys, scores))
    keep(own)


@rarely_used
@task
def _index_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows; of equal scores the first is chosen."""
    a = read(arguments, INDEX)
    key, products = np.zeros(a.width, np.float32), np.zeros(1, np.float32)
    for t in range(begin, end):
        s, position = view(a.seqs, t + 1, np.int64)[t], view(a.positions, t + 1, np.int64)[t]
        seen, weights = (position + 1) // a.rate, view(a.weights + 4 * t * a.J, a.J, np.float32)
        chosen = view(a.chosen + 4 * t * a.count, a.count, np.int32)
        if seen <= a.count:
            for i in range(seen):
                chosen[i] = i
            continue
        scores = np.empty(seen, np.float32)
        for entry in range(seen):
            _copy_entry(a, s, entry, a.entries_width - a.I, key, a.I)
            total = np.float32(0)
            for j in range(a.J):
                q = a.q + 4 * (t * a.J + j) * a.width
                score_one(FLOAT32, q, key.ctypes.data, a.width // LANES, products.ctypes.data)
                total += weights[j] * max(products[0], np.float32(0))
            scores[entry] = total
        least = np.sort(scores)[seen - a.count]
        of_least, n = a.count - np.sum(scores > least), 0
        for entry in range(seen):
            is_least = scores[entry] == least
            if scores[entry] > least or (is_least and of_least > 0):
                of_least -= is_least
                chosen[n] = entry
                n += 1
    keep((key, products))


@compressed_attention.kernel(device="cpu", name="numba", preference=10, supports=declines)
def compressed_attention_numba(
    q_TNH: Tensor,
    heads: HeadLayout,
    cache: LayerCache,
    rows: PagedRows,
    entries: LayerCache | None = None,
    rate: int = 0,
    chosen_TE: Tensor | None = None,
) -> Tensor:
    """See ``ops.compressed_attention``."""
    if cache.keys.dtype != torch.float32:
        return compressed_attention.reference(q_TNH, heads, cache, rows, entries, rate, chosen_TE)
    (_, N, H), q, out_TNH = q_TNH.shape, whole_vectors(q_TNH), torch.zeros(q_TNH.shape)
    seqs_T, positions_T = _places(rows)
    count, pieces = 0 if chosen_TE is None else chosen_TE.shape[1], -(-N // HEADS_A_PIECE)
    kept = (*_cache(cache, rows), *((0, 0, 0, 0, 0) if entries is None else _cache(entries, rows)))
    words = [word.data_ptr() if isinstance(word, Tensor) else word for word in kept]
    values = (
        *(_attend_task(), len(seqs_T) * pieces, 1, q.data_ptr(), seqs_T.data_ptr(), positions_T.data_ptr()),
        *(N, H, q.shape[2], pieces, heads.window, heads.scale, address(heads.sinks_N), cache.keys.shape[2]),
        *(rate if entries is not None else 0, address(chosen_TE), count, out_TNH.data_ptr(), *words),
    )
    call(task_driver(), ATTENTION, values)
    return out_TNH


@choose_entries.kernel(device="cpu", name="numba", preference=10, supports=declines)
def choose_entries_numba(
    q_TJI: Tensor, weights_TJ: Tensor, rate: int, count: int, block_size: int, entries: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.choose_entries``."""
    if entries.keys.dtype != torch.float32:
        return choose_entries.reference(q_TJI, weights_TJ, rate, count, block_size, entries, rows)
    (T, J, width), q, weights_TJ = q_TJI.shape, whole_vectors(q_TJI), weights_TJ.contiguous()
    seqs_T, positions_T = _places(rows)
    chosen_TE, kept = torch.full((T, count), -1, dtype=torch.int32), _cache(entries, rows)
    words = [word.data_ptr() if isinstance(word, Tensor) else word for word in kept]
    values = (
        *(_index_task(), len(seqs_T), 1, q.data_ptr(), weights_TJ.data_ptr(), seqs_T.data_ptr()),
        *(positions_T.data_ptr(), J, width, q.shape[2], block_size, rate, count, chosen_TE.data_ptr(), *words),
    )
    call(task_driver(), INDEX, values)
    return chosen_TE


def _places(rows: PagedRows) -> tuple[Tensor, Tensor]:
    """The sequence of each row that is no padding, and its position; int64."""
    counts_S = rows.cu_seqlens_q.diff().long()
    seqs_T = torch.repeat_interleave(torch.arange(len(counts_S)), counts_S)
    firsts_S = rows.seq_lens_S - rows.cu_seqlens_q[1:]
    return seqs_T, firsts_S.long()[seqs_T] + torch.arange(len(seqs_T))


def _cache(cache: LayerCache, rows: PagedRows) -> tuple[Tensor | int, ...]:
    """The words of ``CACHE``; tensors stand for their addresses."""
    tables_SB, (_, _, slots, width) = rows.of(cache).block_tables_SB.int().contiguous(), cache.keys.shape
    assert cache.keys.is_contiguous(), "the cache must be contiguous"
    return cache.keys, width, slots, tables_SB, tables_SB.shape[1]
