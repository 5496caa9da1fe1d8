"""Tilings of ``pipelined_gemm``: which fit a product, and when it may be used at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from octavo.ops.linear.grouped_linear import TILE, WORDS, chunk_of
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import has_gluon, num_multiprocessors, shared_bytes
from octavo_kernels.triton.tuning.linear_cost import MOST_SUMS

UNIT = 128
"""Columns of a step."""
MOST_PROGRAMS = 1 << 12
BOX_BYTES = 128
"""Boxes in shared memory begin at multiples of so many bytes."""
ALIGNMENT = 16
"""Of what the tensor memory accelerator copies from, in bytes."""
OTHER_BYTES = 1024
"""Shared memory of a program besides its ring buffers."""
KEPT_BYTES = 1024
"""Of shared memory for each program on a multiprocessor, that the hardware keeps for itself."""
LEAST_STEPS = 4
"""Of a program, where several share a tile."""
SHARED_STEPS = 4
"""What it costs a program to share a tile, in steps."""
UNEVEN = 0.75
"""Throughput where programs take several tiles and end in the middle of one, relative to whole tiles."""
LEAST_ROWS = 8
"""Of a tile, as tensor cores take no fewer; padding rows beyond those cost copies and registers."""
LEAST_SORTED = 128
"""Rows of a tile from which on tilings are sorted by expected throughput; those of smaller ones are in their order."""
LEAST_STAGES = {1: 3, 2: 3, 3: 6}
"""By the programs on a multiprocessor: with fewer, more shared memory for each is better."""


@dataclass(frozen=True)
class PipelinedConfig:
    """Tiling parameters."""

    block_n: int
    """Outputs of a tile, and as many ups: a multiple of 16 x warps."""
    block_t: int
    """Rows of a tile, a power of two from 8 on."""
    warps: int
    """4 or 8."""
    stages: int
    """Steps whose operands are in shared memory at once, or on their way to it."""
    programs: int
    """Among which the steps of the product are divided."""
    registers: int
    """Of a thread, at most."""


class _Tiling(NamedTuple):
    """A configuration for any product: at most so many stages, and as many programs on a multiprocessor."""

    block_n: int
    warps: int
    resident: int
    registers: int
    stages: int
    throughput: float = 1.0
    """Relative to the fastest tiling, of products whose whole tiles keep all multiprocessors busy."""


_THREE, _TWO, _ONE = _Tiling(64, 4, 3, 80, 8), _Tiling(64, 4, 2, 128, 8, 0.75), _Tiling(64, 4, 1, 168, 5, 0.8)
_WIDE = _Tiling(128, 8, 1, 168, 8, 0.87)
_TILINGS = {
    8: (_THREE, _TWO, _Tiling(128, 4, 2, 128, 8), _WIDE),
    16: (_THREE, _TWO, _Tiling(128, 4, 2, 128, 8), _WIDE),
    32: (_THREE, _TWO, _WIDE),
    64: (_TWO, _WIDE),
    128: (_TWO, _ONE, _Tiling(128, 4, 1, 168, 5, 0.84), _WIDE),
    256: (_ONE._replace(registers=255, throughput=0.93), _WIDE._replace(throughput=1.0)),
}
"""By the rows of a tile, as measured on an H100; of few rows the likeliest first. Narrow tiles give multiprocessors
several programs, one of which ends a tile while another multiplies; wide ones take fewer rows from the cache."""

_EXPERT_TILINGS = {
    8: (_THREE, _TWO, _Tiling(128, 4, 2, 128, 8), _WIDE),
    16: (_Tiling(128, 4, 2, 128, 8), _THREE, _TWO, _WIDE),
    32: (_Tiling(128, 4, 2, 128, 8), _THREE, _TWO, _WIDE),
    64: (_Tiling(256, 8, 1, 168, 8), _TWO, _WIDE),
    128: (_Tiling(256, 8, 1, 168, 8), _WIDE, _TWO, _ONE),
}
"""Of experts, where each program has several tiles, as measured on an H100 with MXFP4 and INT4; the fastest first."""


def takes(product: GroupedProduct, device: torch.device) -> bool:
    """Whether the kernel computes this product, and runs here.

    Rows, and the scales, zeros and minima of a group, must begin at multiples of 16 bytes for the tensor memory
    accelerator; ups at a tile of the weight.
    """
    is_whole = product.K % 8 == 0 and (not product.is_gated or product.outputs % TILE == 0)
    sides = [product.scale_bytes, *([1] if product.has_zeros else []), *([2] if product.has_minima else [])]
    is_whole &= product.groups == 1 or all(product.N * size % ALIGNMENT == 0 for size in sides)
    return is_whole and product.dtype == torch.bfloat16 and has_gluon(device)


def fits(config: PipelinedConfig, product: GroupedProduct, device: torch.device) -> bool:
    """Whether the kernel has the shared memory to compute this product so, if it takes it."""
    return config.stages * _stage_bytes(config.block_n, config.block_t, product) + OTHER_BYTES <= shared_bytes(device)


def pipelined_configs(product: GroupedProduct, rows: int, device: torch.device) -> list[PipelinedConfig]:
    """What fits this product of up to ``rows`` rows, the likeliest first: none if the kernel does not take it.

    Fewer rows than a tile has are filled up with zeros by the copies, and not stored. That takes the copies longer
    than rows that are there: 160 in place of 85 us for 288 rows in tiles of 256.
    """
    found = list(_configs(product, rows, device)) if takes(product, device) else []
    return [config for _, config in sorted(found, key=lambda item: -item[0])]


def expert_config(product: GroupedProduct, block_t: int, device: torch.device) -> PipelinedConfig | None:
    """The likeliest for experts, whose tiles have up to ``block_t`` rows; ``None`` if the kernel does not take them.

    The product is that of one expert. The host does not know how many tiles there are: all that there is room for
    divide them.
    """
    fitting = _fitting(product, block_t, _EXPERT_TILINGS[block_t], device) if takes(product, device) else iter(())
    return next((config for _, config in fitting), None)


def _configs(product: GroupedProduct, rows: int, device: torch.device) -> Iterator[tuple[float, PipelinedConfig]]:
    """What fits, with its expected throughput; 0 for all tiles of few rows, which are in their order."""
    most_rows = 128 if product.is_gated or (rows > 256 and rows % 256) else 256  # gates and ups take registers twice
    largest = min(max(LEAST_ROWS, triton.next_power_of_2(rows)), most_rows)
    for block_t in (largest, 128) if largest > 128 else (largest,):
        for throughput, config in _fitting(product, block_t, _TILINGS[block_t], device):
            tiles = triton.cdiv(product.outputs, config.block_n) * triton.cdiv(rows, block_t)
            steps, most = triton.cdiv(product.K, UNIT), config.programs
            config = replace(config, programs=_programs(tiles, steps, most))
            yield _expected(throughput, config, tiles, steps, most) if largest >= LEAST_SORTED else 0.0, config


def _fitting(
    product: GroupedProduct, block_t: int, tilings: tuple[_Tiling, ...], device: torch.device
) -> Iterator[tuple[float, PipelinedConfig]]:
    """What fits, with its throughput, and as many programs as there is room for."""
    for block_n, warps, resident, registers, most_stages, throughput in tilings:
        room = (shared_bytes(device) + KEPT_BYTES) // resident - KEPT_BYTES - OTHER_BYTES
        stages = min(most_stages, room // _stage_bytes(block_n, block_t, product))
        sums = product.weights * block_n * block_t
        if stages >= LEAST_STAGES[resident] and sums <= MOST_SUMS * 32 * warps:
            programs = resident * num_multiprocessors(device)
            yield throughput, PipelinedConfig(block_n, block_t, warps, stages, programs, registers)


def _programs(tiles: int, steps: int, most: int) -> int:
    """As many programs for each tile as there is room for, or all that there is room for, with several tiles each.

    A tile that ends in the middle of a program costs more than the multiprocessors that an even division leaves idle.
    """
    return tiles * max(1, min(most // tiles, steps // LEAST_STEPS)) if tiles <= most else most


def _expected(throughput: float, config: PipelinedConfig, tiles: int, steps: int, most: int) -> float:
    """Throughput of a tiling with so many tiles of so many steps, where ``most`` programs fill the device."""
    if tiles > most:
        return throughput * UNEVEN
    own_steps = steps * tiles / config.programs
    shared = own_steps / (own_steps + SHARED_STEPS) if config.programs > tiles else 1.0
    return throughput * shared * config.programs / most


def _stage_bytes(block_n: int, block_t: int, product: GroupedProduct) -> int:
    """Operands of a step: rows, words, scales, zeros, and minima, whose numbers have 4 bytes at most."""
    chunk = chunk_of(product.number)
    scales = 0 if product.groups == 1 else max(BOX_BYTES, block_n * product.scale_bytes)
    zeros = max(BOX_BYTES, block_n) if product.has_zeros else 0
    minima = max(BOX_BYTES, block_n * 4) if product.has_minima else 0
    own = block_n * WORDS * 2 + product.parts * (scales + zeros + minima)
    return block_t * UNIT * 2 + product.weights * (UNIT // chunk) * own
