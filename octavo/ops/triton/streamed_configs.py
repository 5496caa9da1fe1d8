"""Tilings of ``streamed_gemv``: which fit a product, and when it may be used at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.grouped_linear import TILE, Number, PackedGroups, chunk_of
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


def streamed_configs(
    number: Number, groups: int, K: int, outputs: int, is_gated: bool, device: torch.device
) -> list[StreamedConfig]:
    """What fits a weight of this form, the likeliest first: none if the kernel does not take it, or cannot run here.

    Half of the shared memory is left to the kernel before or after, so that both can be there at once.
    """
    chunk = chunk_of(number)
    is_whole = K % chunk == 0 and outputs % TILE == 0 and (groups == 1 or K // groups % chunk == 0)
    if not (is_whole and has_gluon(device)):
        return []
    is_many = outputs // TILE >= MANY_TILES * num_multiprocessors(device)
    sizes = [(4, 2), (8, 1), (4, 1)] if is_many else [(8, 1), (4, 1), (4, 2)]
    row_bytes, weights = 2 * K, 2 if is_gated else 1
    found = []
    for warps, programs in sizes:
        room = shared_bytes(device) // (2 * programs) - OTHER_BYTES - row_bytes
        found += sorted(_of_size(warps, programs, K // chunk, room, weights), key=_ring_bytes, reverse=True)[:2]
    return found


def _of_size(warps: int, programs: int, chunks: int, room: int, weights: int) -> Iterator[StreamedConfig]:
    """Those with at least two stages in ``room`` bytes; every warp takes as many chunks as the others."""
    for each in (4, 3, 2, 1):
        stage_bytes = warps * each * weights * (CHUNK_BYTES + 2 * TILE + TILE)
        if chunks % (warps * each) == 0 and (stages := room // stage_bytes) >= 2:
            yield StreamedConfig(warps, each, min(stages, MOST_STAGES), programs)


def _ring_bytes(config: StreamedConfig) -> int:
    return config.stages * config.chunks * config.warps


def takes(x_TK: Tensor, packed: PackedGroups) -> bool:
    """Whether the kernel multiplies this row and weight, if its sizes suit it."""
    has_groups = packed.zeros_GN is None or len(packed.scales_GN) > 1
    return len(x_TK) == 1 and x_TK.dtype == torch.bfloat16 and packed.minima_GN is None and has_groups
