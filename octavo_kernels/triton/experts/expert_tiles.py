"""Pairs of a token and an expert, sorted by expert on the device and split into tiles for the experts' products.

The host does not know the counts: there are as many tiles as any choice of experts could need, and those beyond the
last are empty. So the same launches serve every step of a CUDA graph.

Shapes: T tokens, S chosen for each, P = T S pairs, X experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.launch import after_predecessor, counters, is_invariant, launch

MIN_ROWS, MAX_ROWS = 16, 128
INVARIANT_ROWS = 64
ROOM = 6
"""Where tokens spread evenly, most experts have fewer rows than twice their mean."""
PAIRS_AT_ONCE = 2048


class Tiles(NamedTuple):
    """Runs of pairs of one expert, on the device; int32 [tiles], those beyond the last used one have no rows."""

    order_P: Tensor
    """int32: pairs sorted by expert, and then by their index; those without one have no place."""
    expert: Tensor
    first: Tensor
    """Place of the first pair in the order."""
    rows: Tensor
    used: Tensor
    """Number of tiles with rows, and of pairs in them, [2]."""
    block: int
    """Most rows of a tile."""


def tile_rows(P: int, num_experts: int, max_rows: int = MAX_ROWS, room: int = ROOM, min_rows: int = MIN_ROWS) -> int:
    """Most rows of a tile for so many pairs: at least ``room`` quarters of the mean of an expert's rows."""
    if is_invariant():
        return min(INVARIANT_ROWS, max_rows)
    return min(max_rows, max(min_rows, int(triton.next_power_of_2(triton.cdiv(room * P, 4 * num_experts)))))


def sort_into_tiles(ids_TS: Tensor, num_experts: int, block: int) -> Tiles:
    """Split the pairs of each expert into tiles of up to ``block`` rows; pairs with a negative id have none. Data that
    depends on the ids stays on the device."""
    device, P = ids_TS.device, ids_TS.numel()
    num_tiles = min(P, num_experts) + P // block
    sizes = (P, num_experts, num_tiles, num_tiles, num_tiles, 2)
    order_P, count_X, expert, first, rows, used = (
        torch.empty(size, dtype=torch.int32, device=device) for size in sizes
    )
    at_once = min(PAIRS_AT_ONCE, max(128, triton.next_power_of_2(P)))
    launch(
        sort_kernel, (num_experts,), ids_TS.contiguous(), order_P, count_X, counters(device, 1), expert, first, rows,
        used, P, num_experts, num_tiles, block, triton.next_power_of_2(num_experts), at_once, num_warps=4,
    )  # fmt: skip
    return Tiles(order_P, expert, first, rows, used, block)


@triton.jit(do_not_specialize=["P", "num_tiles"])
def sort_kernel(
    ids_ptr: tl.tensor, order_ptr: tl.tensor, count_ptr: tl.tensor, counter_ptr: tl.tensor,
    expert_ptr: tl.tensor, first_ptr: tl.tensor, rows_ptr: tl.tensor, used_ptr: tl.tensor,
    P: tl.tensor, X: tl.tensor, num_tiles: tl.tensor,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Place the pairs of one expert, behind those of all experts before it; the last program makes the tiles."""
    own, i = tl.program_id(0), tl.arange(0, PAIRS)
    after_predecessor(PDL)
    is_before = tl.zeros([PAIRS], tl.int32)
    for start in range(0, P, PAIRS):
        expert = tl.load(ids_ptr + start + i, mask=start + i < P, other=X).to(tl.int32)
        is_before += ((expert >= 0) & (expert < own)).to(tl.int32)
    first = tl.sum(is_before, 0)
    place = first
    for start in range(0, P, PAIRS):
        expert = tl.load(ids_ptr + start + i, mask=start + i < P, other=X).to(tl.int32)
        is_own = (expert == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, 0) - 1, start + i, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    tl.store(count_ptr + own, place - first)
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == X - 1:
        tl.store(counter_ptr, 0)
        _make_tiles(count_ptr, expert_ptr, first_ptr, rows_ptr, used_ptr, X, num_tiles, BLOCK, EXPERTS, PAIRS)


@triton.jit
def _make_tiles(
    count_ptr: tl.tensor, expert_ptr: tl.tensor, first_ptr: tl.tensor, rows_ptr: tl.tensor, used_ptr: tl.tensor,
    X: tl.tensor, num_tiles: tl.tensor, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    e = tl.arange(0, EXPERTS)
    count_X = tl.load(count_ptr + e, mask=e < X, other=0, cache_modifier=".cg")
    first_X = tl.cumsum(count_X, 0) - count_X
    tiles_X = (count_X + BLOCK - 1) // BLOCK
    at_X = tl.cumsum(tiles_X, 0) - tiles_X
    for n in range(tl.max(tiles_X, 0)):
        is_tile = n < tiles_X
        tl.store(expert_ptr + at_X + n, e, mask=is_tile)
        tl.store(first_ptr + at_X + n, first_X + n * BLOCK, mask=is_tile)
        tl.store(rows_ptr + at_X + n, tl.minimum(count_X - n * BLOCK, BLOCK), mask=is_tile)
    i, used = tl.arange(0, PAIRS), tl.sum(tiles_X, 0)
    tl.store(used_ptr, used)
    tl.store(used_ptr + 1, tl.sum(count_X, 0))
    for start in range(used, num_tiles, PAIRS):
        tl.store(rows_ptr + start + i, tl.zeros([PAIRS], tl.int32), mask=start + i < num_tiles)
