"""``choose_keys`` for the CPU: a row's scores of sixteen positions at a time, then the highest by their bits.

A row's arithmetic does not depend on the other rows: heads are added in order, and dot products as in attention.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.cached_rows import row_length
from octavo.ops.attention.choose_keys import ChosenKeys, choose_keys
from octavo_kernels.cpu.attention.attention_dots import SCORE_ROWS, score
from octavo_kernels.cpu.attention.cached_rows import FORMATS, rotate, row_bytes, unpack
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import compiled_task, inlined
from octavo_kernels.cpu.memory import fields, int_bits, keep, read, view, whole_lines
from octavo_kernels.cpu.tensors import declines_floats
from octavo_kernels.cpu.vector_ir import FLOAT32, LANES

ARGUMENTS = fields(
    "task T piece queries weights N W width keys block_size tables table_width seqs seen longest count most slots"
)
"""``seqs`` and ``seen`` are int64 [T]: a row's sequence, and how many positions it sees, at most ``longest``."""


@inlined
def _slot(a: Any, table: Any, position: int) -> Any:
    return table[position // a.block_size] * a.block_size + position % a.block_size


@inlined
def _least_kept(codes: Any, found: Any, wanted: int) -> Any:
    """The least of the ``wanted`` largest integers, and how many equal to it are among them."""
    least = 0
    for level in range(4):
        shift = 24 - 8 * level
        for byte in range(256):
            found[byte] = 0
        for code in codes:
            if level == 0:
                found[(code >> shift) + 128] += 1
            elif code >> (shift + 8) == least:
                found[(code >> shift) & 255] += 1
        byte = 255
        while found[byte] < wanted:
            wanted -= found[byte]
            byte -= 1
        least = byte - 128 if level == 0 else least * 256 + byte
    return least, wanted


@functools.cache
def choose_task(number_format: int) -> int:
    """Task over rows."""

    def choose(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        steps, one_row = a.width // LANES, row_bytes(number_format, a.W)
        queries, keys, products = whole_lines(a.N, a.width), whole_lines(LANES, a.width), whole_lines(SCORE_ROWS, LANES)
        queries[:] = 0
        keys[:] = 0  # behind each row's numbers
        totals, codes, found = np.empty(LANES, np.float32), np.empty(a.longest, np.int32), np.empty(256, np.int64)
        seqs, seen = view(a.seqs, a.T, np.int64), view(a.seen, a.T, np.int64)
        for t in range(begin, end):
            table = view(a.tables + 4 * seqs[t] * a.table_width, a.table_width, np.int32)
            slots = view(a.slots + 4 * t * a.most, a.most, np.int32)
            if seen[t] <= a.count:
                for position in range(seen[t]):
                    slots[position] = _slot(a, table, position)
                continue
            source = view(a.queries + 4 * t * a.N * a.W, a.N * a.W, np.float32)
            weights = view(a.weights + 4 * t * a.N, a.N, np.float32)
            for head in range(a.N):
                for i in range(a.W):
                    queries[head, i] = source[head * a.W + i]
                for i in range(a.W, a.width):
                    queries[head, i] = 0
                rotate(number_format, queries[head])
            for first in range(0, seen[t], LANES):
                count = min(LANES, seen[t] - first)
                for j in range(count):
                    row = a.keys + one_row * _slot(a, table, first + j)
                    unpack(number_format, row, a.W, 1, keys[j].ctypes.data, steps)
                for j in range(LANES):
                    totals[j] = 0
                for head in range(0, a.N, SCORE_ROWS):
                    num_heads, query, out = min(SCORE_ROWS, a.N - head), queries[head].ctypes.data, products.ctypes.data
                    strides = queries.strides[0], products.strides[0]
                    score(FLOAT32, 0, query, strides[0], num_heads, keys.ctypes.data, steps, out, strides[1], 0)
                    for i in range(num_heads):
                        for j in range(LANES):
                            totals[j] += weights[head + i] * max(products[i, j], np.float32(0))
                for j in range(count):
                    bits = int_bits(totals[j] + np.float32(0))  # zeros are equal
                    codes[first + j] = bits ^ np.int32(0x7FFFFFFF) if bits < 0 else bits
            least, equal = _least_kept(codes[: seen[t]], found, a.count)
            place = 0
            for position in range(seen[t]):
                if codes[position] > least or (codes[position] == least and equal > 0):
                    equal -= codes[position] == least
                    slots[place] = _slot(a, table, position)
                    place += 1
        keep((queries, keys, products, totals, codes, found))

    return compiled_task(choose)


@choose_keys.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def choose_keys_numba(q_TNW: Tensor, weights_TN: Tensor, cache: LayerCache, rows: PagedRows, count: int) -> ChosenKeys:
    """See ``ops.choose_keys``; the indexer's keys must be contiguous.

    Raises ``IndexError`` for block numbers that do not fit the cache.
    """
    index, (T, N, W) = cache.index_keys, q_TNW.shape
    assert index is not None, "the layer has no indexer"
    assert index.is_contiguous(), "the indexer's keys must be contiguous"
    assert index.shape[1::2] == (1, row_length(index.dtype, W)), f"keys of {W} numbers are not those of the cache"
    num_blocks, block_size = index.shape[0], index.shape[2]
    tables_SB = rows.of(cache).block_tables_SB.to(torch.int32).contiguous()
    bounds, lengths_S = rows.cu_seqlens_q.long(), rows.seq_lens_S.long()
    width, num_rows = tables_SB.shape[1], int(bounds[-1])
    is_read_SB = torch.arange(width) * block_size < lengths_S[:, None]
    if ((tables_SB < 0) | (tables_SB >= num_blocks))[is_read_SB].any() or int(lengths_S.max()) > width * block_size:
        raise IndexError("choose_keys: lengths or block numbers do not fit the cache and tables")
    seqs_T, seen_T = torch.zeros(T, dtype=torch.int64), torch.zeros(T, dtype=torch.int64)
    seqs_T[:num_rows] = torch.arange(len(lengths_S)).repeat_interleave(bounds.diff())
    own = seqs_T[:num_rows]
    seen_T[:num_rows] = torch.arange(1, num_rows + 1) - bounds[own + 1] + lengths_S[own]
    most = min(count, width * block_size)
    slots_TK, queries, weights_TN = (
        torch.zeros(T, most, dtype=torch.int32),
        q_TNW.float().contiguous(),
        weights_TN.contiguous(),
    )
    values = (
        *(choose_task(FORMATS[index.dtype]), T, 1, queries.data_ptr(), weights_TN.data_ptr(), N, W),
        *(-(-W // LANES) * LANES, index.data_ptr(), block_size, tables_SB.data_ptr(), width, seqs_T.data_ptr()),
        *(seen_T.data_ptr(), int(seen_T.max()), count, most, slots_TK.data_ptr()),
    )
    call(task_driver(), ARGUMENTS, values)
    starts = torch.arange(T + 1, dtype=torch.int32).clamp_(max=num_rows)
    return ChosenKeys(slots_TK, seen_T.clamp(max=count).int(), starts)
