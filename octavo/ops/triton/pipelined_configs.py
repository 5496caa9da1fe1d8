"""Tilings of ``pipelined_gemm``: which fit a product, and when it may be used at all."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = 128
"""Columns of a step."""
MOST_PROGRAMS = 1 << 12


@dataclass(frozen=True)
class PipelinedConfig:
    """Tiling parameters."""

    block_n: int
    """Outputs of a tile, and as many ups: a multiple of 16 x warps."""
    block_t: int
    """Rows of a tile, a power of two from 16 on."""
    warps: int
    """4 or 8."""
    stages: int
    """Steps whose operands are in shared memory at once, or on their way to it."""
    programs: int
    """Among which the steps of the product are divided."""
    registers: int
    """Of a thread, at most."""
