"""Tilings of ``streamed_gemv`` and ``streamed_output_mlp``: which fit a product, and when they may be used at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from octavo.ops.linear.grouped_linear import TILE, chunk_of
from octavo_kernels.hopper.pipelined_configs import KEPT_BYTES
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import has_gluon, num_multiprocessors, shared_bytes

CHUNK_BYTES = 1024
"""Words of 16 outputs, in a piece."""
OTHER_BYTES = 1024
"""Of shared memory for each program, to add up the sums of its warps."""
MOST_STAGES = 8
FEWEST_STAGES = 3
"""That keep the memory busy while a program computes."""
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


@dataclass(frozen=True)
class OutputMLPConfig:
    """Tiling parameters of ``streamed_output_mlp``."""

    warps: int
    """4 or 8."""
    chunks: tuple[int, int, int]
    """Of every warp at a time, for each of the three products."""
    stages: int
    """Steps whose words are in shared memory, or on their way to it."""
    programs: int
    """On each multiprocessor."""

    @property
    def places(self) -> int:
        """Chunks of every warp that a step has at most; gates have ups beside them."""
        output, gates, down = self.chunks
        return max(output, 2 * gates, down)


def takes(product: GroupedProduct, device: torch.device) -> bool:
    """Whether the kernel computes this product for one row, if its sizes suit it, and runs here."""
    is_whole = product.K % chunk_of(product.number) == 0 and product.outputs % TILE == 0
    has_groups = product.groups > 1 or not product.has_zeros
    return is_whole and has_groups and product.dtype == torch.bfloat16 and has_gluon(device)


def streamed_configs(product: GroupedProduct, device: torch.device) -> list[StreamedConfig]:
    """What fits this product, the likeliest first: none if the kernel does not take it, or cannot run here.

    Two thirds of the shared memory are left to the kernel before or after, so that both can be there at once.
    """
    if not takes(product, device):
        return []
    is_many = product.outputs // TILE >= MANY_TILES * num_multiprocessors(device)
    sizes = [(4, 2), (8, 1), (4, 1)] if is_many else [(8, 1), (4, 1), (4, 2)]
    found = []
    for warps, programs in sizes:
        room = _room(1, programs, device) - _row_bytes(product)
        found += sorted(_of_size(warps, programs, product, room), key=_likelihood, reverse=True)[:2]
    return sorted(found, key=lambda config: config.stages < FEWEST_STAGES)


def output_mlp_config(products: Sequence[GroupedProduct], device: torch.device) -> OutputMLPConfig | None:
    """The tiling of attention's output projection, gates with ups, and the down projection as one kernel; ``None`` if
    it does not take them.

    A third of the shared memory is left to the kernel before or after. On an H100 large steps were faster than many
    stages, and one program of eight warps than two of four.
    """
    kinds = {
        (each.number, each.has_zeros, each.has_minima, each.groups > 1, each.parts, each.scale_bytes)
        for each in products
    }
    if len(kinds) > 1 or not all(takes(product, device) for product in products):
        return None
    found: list[OutputMLPConfig] = []
    for warps, programs in ((8, 1), (4, 2), (4, 1)):
        room = _room(2, programs, device) - max(map(_row_bytes, products))
        found += _for_warps(warps, programs, products, room)
    return max(found, key=_step_size, default=None)


def _for_warps(warps: int, programs: int, products: Sequence[GroupedProduct], room: int) -> Iterator[OutputMLPConfig]:
    """Those with enough stages in ``room`` bytes, in steps of up to four and up to two chunks of every warp."""
    for most in (4, 2):
        output, gates, down = (
            next((c for c in (4, 2, 1) if c * each.weights <= most and each.chunks % (warps * c) == 0), 0)
            for each in products
        )
        config = OutputMLPConfig(warps, (output, gates, down), 0, programs)
        stages = min(room // (warps * max(1, config.places) * _place_bytes(products[0])), MOST_STAGES)
        if output * gates * down and stages >= FEWEST_STAGES:
            yield replace(config, stages=stages)


def _step_size(config: OutputMLPConfig) -> tuple[int, int]:
    """Chunks of a step on a multiprocessor, and of every warp."""
    return config.warps * config.programs * config.places, config.places


def _of_size(warps: int, programs: int, product: GroupedProduct, room: int) -> Iterator[StreamedConfig]:
    """Those with at least two stages in ``room`` bytes; every warp takes as many chunks as the others."""
    for each in (4, 3, 2, 1):
        stage_bytes = warps * each * product.weights * _place_bytes(product)
        if product.chunks % (warps * each) == 0 and (stages := room // stage_bytes) >= 2:
            yield StreamedConfig(warps, each, min(stages, MOST_STAGES), programs)


def _room(thirds: int, programs: int, device: torch.device) -> int:
    """Shared memory of each program, where so many have so many thirds of a multiprocessor's."""
    return thirds * (shared_bytes(device) + KEPT_BYTES) // (3 * programs) - KEPT_BYTES - OTHER_BYTES


def _row_bytes(product: GroupedProduct) -> int:
    """The row in bfloat16, and the sums of its groups in each chunk in float32."""
    return 2 * product.K + (4 * product.chunks * product.parts if product.groups > 1 else 0)


def _place_bytes(product: GroupedProduct) -> int:
    """Words, scales, zeros and minima of a chunk."""
    return CHUNK_BYTES + TILE * product.parts * (product.scale_bytes + product.has_zeros + 4 * product.has_minima)


def _likelihood(config: StreamedConfig) -> tuple[int, int]:
    """Three stages are enough, and then large steps are better than many."""
    return min(config.stages, FEWEST_STAGES), config.chunks
