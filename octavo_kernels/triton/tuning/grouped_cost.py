"""Configurations of ``grouped_linear`` that may be the fastest for a product, in an order in which to measure them.

Tiles are ordered by the times of ``linear_cost``, whose numbers are fitted to weights of 16 bits and do not count the
unpacking: good for a choice of what to measure, not for the choice itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import triton

from octavo.ops.linear.grouped_linear import BITS, WORDS, chunk_of
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_gemv import MAX_ROWS, GroupedGemvConfig
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.linear.skinny_gemm import MAX_TILES, SHARED_BY_COMPILER
from octavo_kernels.triton.tuning.linear_cost import MOST_SUMS, ColumnLoop, Gpu, loop_microseconds

MOST_SHARED = 100_000
"""Bytes of shared memory of a program for few rows: a multiprocessor should have two."""
MANY_TILES = 4
"""Of 64 outputs for each multiprocessor, from which on tiles for few rows may be so wide."""
PARTS = (4, 4), (8, 4), (8, 8), (16, 8)
"""Of a tile for few rows, and the warps that have them."""
LEAST_CHUNKS = 4
"""Of a split."""
MOST_SPLITS = 16
AT_ONCE = 8
"""Of any so many neighbours in the list, each kernel has its share."""
GEMMS = {1: 1, 8: 3, MAX_ROWS: 5}
"""Of those, how many are ``GroupedGemmConfig``, by the bucket of rows; for more rows, all."""
NEVER, PREFETCHED, EARLY, LATE = (
    {"release": "never", "prefetch": False},
    {"release": "early", "prefetch": True},
    {"release": "early", "prefetch": False},
    {"release": "late", "prefetch": False},
)
"""When the next kernel may start, and whether a tile is prefetched."""
ONE_ROW_ENDS, FEW_ROWS_ENDS = (NEVER, PREFETCHED, EARLY, LATE), (NEVER, EARLY, PREFETCHED, LATE)
GEMM_ENDS = ({"release": "late"}, {"release": "early"})
"""The likeliest first."""
TILES_PER_END = 3

GroupedKernel = GroupedGemvConfig | GroupedGemmConfig


class Predicted(NamedTuple):
    """A configuration and its predicted time."""

    microseconds: float
    tile: tuple[int, ...]
    """Of configurations with the same tile the best is kept."""
    config: GroupedKernel


def ranked(product: GroupedProduct, rows: int, gpu: Gpu) -> list[GroupedKernel]:
    """Configurations for up to ``rows`` rows on this GPU, different ones first."""
    gemms = _with_ends(_best_of_tiles(_gemms(product, rows, gpu)), GEMM_ENDS)
    if rows > MAX_ROWS:
        return gemms
    gemvs = _with_ends(_best_of_tiles(_gemvs(product, rows, gpu)), ONE_ROW_ENDS if rows == 1 else FEW_ROWS_ENDS)
    share = GEMMS[rows]
    placed = [(i / (AT_ONCE - share), config) for i, config in enumerate(gemvs)]
    placed += [(i / share, config) for i, config in enumerate(gemms)]
    return [config for _, config in sorted(placed, key=lambda item: item[0])]


def _best_of_tiles(predicted: Iterable[Predicted]) -> list[GroupedKernel]:
    """The best of each tile, the best of all first; tiles of different outputs take turns."""
    found: dict[tuple[int, ...], Predicted] = {}
    for item in sorted(predicted, key=lambda item: item.microseconds):
        found.setdefault(item.tile, item)
    turns: Counter[int] = Counter()
    placed = []
    for item in found.values():
        placed.append((turns[item.config.block_n], item.config))
        turns[item.config.block_n] += 1
    return [config for _, config in sorted(placed, key=lambda item: item[0])]


def _with_ends(configs: Sequence[GroupedKernel], ends: Sequence[dict[str, Any]]) -> list[GroupedKernel]:
    """Every configuration with every end; another end comes as late as the configuration TILES_PER_END further on."""
    places = itertools.product(range(len(configs)), range(len(ends)))
    return [replace(configs[i], **ends[j]) for i, j in sorted(places, key=lambda at: at[0] + TILES_PER_END * at[1])]


def _gemvs(product: GroupedProduct, rows: int, gpu: Gpu) -> Iterator[Predicted]:
    """Tiles whose words, rows, and norm of a single row fit into shared memory, and whose sums fit into registers."""
    weights, chunk = product.weights, chunk_of(product.number)
    block_t = 8 if rows <= 8 else MAX_ROWS
    most_shared = min(MOST_SHARED, gpu.shared_bytes - SHARED_BY_COMPILER)
    is_wide = product.outputs >= 64 * MANY_TILES * gpu.multiprocessors
    for block_n, (split, warps) in itertools.product((16, 32, 64) if is_wide else (16, 32), PARTS):
        row_bytes = split * block_t * chunk * 2
        chunk_bytes = split * weights * block_n * WORDS * 2 + row_bytes
        norm_bytes = row_bytes if rows == 1 else 0
        sums = weights * split * block_n * block_t
        if _registers(product, sums) > MOST_SUMS * 32 * warps:
            continue
        for stages in range(2, 6):
            if (stages - 1) * (chunk_bytes + norm_bytes) > most_shared:
                continue
            programs, chunks = triton.cdiv(product.outputs, block_n), triton.cdiv(product.chunks, split)
            loop = ColumnLoop(programs, chunks, chunk_bytes, stages, warps, sums)
            taken = loop_microseconds(_num_bytes(product, rows), loop, False, gpu)
            yield Predicted(taken, (block_n, split, warps), GroupedGemvConfig(block_n, split, warps, stages))


def _gemms(product: GroupedProduct, rows: int, gpu: Gpu) -> Iterator[Predicted]:
    """Tiles that fit, with splits for one to three programs on each multiprocessor."""
    weights, chunk = product.weights, chunk_of(product.number)
    block_t = min(max(16, rows), 64 if product.is_gated else 128)
    most_shared = gpu.shared_bytes - SHARED_BY_COMPILER
    for block_n, warps, programs in itertools.product((64, 128), (4, 8), (1, 2, 3)):
        tiles = triton.cdiv(product.outputs, block_n) * triton.cdiv(rows, block_t)
        most_splits = MOST_SPLITS if tiles <= MAX_TILES else 1
        splits = max(1, min(programs * gpu.multiprocessors // tiles, product.chunks // LEAST_CHUNKS, most_splits))
        row_bytes = block_t * chunk * 2
        chunk_bytes = weights * block_n * WORDS * 2 + row_bytes
        sums = weights * block_n * block_t
        if (block_n == 64 and warps == 8) or _registers(product, sums) > MOST_SUMS * 32 * warps:
            continue
        for stages in range(2, 6):
            if (stages - 1) * chunk_bytes + row_bytes > most_shared:
                continue
            loop = ColumnLoop(tiles * splits, triton.cdiv(product.chunks, splits), chunk_bytes, stages, warps, sums)
            taken = loop_microseconds(_num_bytes(product, rows), loop, splits > 1, gpu)
            config = GroupedGemmConfig(block_n, block_t, warps, stages, splits)
            yield Predicted(taken, (block_n, warps, splits), config)


def _registers(product: GroupedProduct, sums: int) -> int:
    """Registers of a program for accumulators: one set for the current group and one for all groups."""
    return sums if product.groups == 1 else 2 * sums


def _num_bytes(product: GroupedProduct, rows: int) -> int:
    """That a product reads: numbers, scales and rows."""
    N, K = product.N, product.K
    return N * K * BITS[product.number] // 8 + 2 * N * product.groups + 2 * rows * K
