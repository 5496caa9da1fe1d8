"""Tilings of ``streamed_gemv``: which fit a product, and when it may be used at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.ops.grouped_linear import TILE, chunk_of
from octavo.ops.triton.grouped_product import GroupedProduct
from octavo.ops.triton.launch import has_gluon, num_multiprocessors, shared_bytes

CHUNK_BYTES = 1024
"""Words of 16 outputs, in a piece."""
OTHER_BYTES = 2048
"""Of shared memory for each program: sums, and what the hardware keeps."""
MOST_STAGES = 8
MANY_TILES = 4
"""Of 16 outputs for each multiprocessor, from which on two programs of half the size share it: while one ends a tile,
the other multiplies."""


@dataclass(frozen=True)
class StreamedConfig:
    """Tiling parameters."""

    warps: int
    """4 or 8; each takes chunks of its own."""
    chunks: int
    """Of every warp, at a time."""
    stages: int
    """So many times the chunks of all warps are in shared memory, or on their way to it."""
    programs: int
    """On each multiprocessor."""


def takes(product: GroupedProduct, device: torch.device) -> bool:
    """Whether the kernel computes this product for one row, if its sizes suit it, and runs here."""
    is_whole = product.K % chunk_of(product.number) == 0 and product.outputs % TILE == 0 and product.has_whole_groups
    has_groups = product.groups > 1 or not product.has_zeros
    is_plain = product.dtype == torch.bfloat16 and not product.has_minima
    return is_whole and has_groups and is_plain and has_gluon(device)


def streamed_configs(product: GroupedProduct, device: torch.device) -> list[StreamedConfig]:
    """What fits this product, the likeliest first: none if the kernel does not take it, or cannot run here.

    Half of the shared memory is left to the kernel before or after, so that both can be there at once.
    """
    if not takes(product, device):
        return []
    is_many = product.outputs // TILE >= MANY_TILES * num_multiprocessors(device)
    sizes = [(4, 2), (8, 1), (4, 1)] if is_many else [(8, 1), (4, 1), (4, 2)]
    found = []
    for warps, programs in sizes:
        room = shared_bytes(device) // (2 * programs) - OTHER_BYTES - 2 * product.K
        found += sorted(_of_size(warps, programs, product, room), key=_ring_bytes, reverse=True)[:2]
    return found


def _of_size(warps: int, programs: int, product: GroupedProduct, room: int) -> Iterator[StreamedConfig]:
    """Those with at least two stages in ``room`` bytes; every warp takes as many chunks as the others."""
    for each in (4, 3, 2, 1):
        stage_bytes = warps * each * product.weights * (CHUNK_BYTES + 2 * TILE + TILE)
        if product.chunks % (warps * each) == 0 and (stages := room // stage_bytes) >= 2:
            yield StreamedConfig(warps, each, min(stages, MOST_STAGES), programs)


def _ring_bytes(config: StreamedConfig) -> int:
    return config.stages * config.chunks * config.warps
