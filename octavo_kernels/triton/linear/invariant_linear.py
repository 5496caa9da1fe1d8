"""``linear`` whose rows do not depend on the number of rows or on the other rows, to the bit.

A number's sum is taken in one order, fixed by the shape of the weight alone: in how many splits its columns are added
up, and how many columns at a time. What may vary with the number of rows is who does it: tiles may be of any size, and
the splits of a tile's columns go to several programs or, where there are many tiles, to one that takes them in turn (He
et al., "Defeating Nondeterminism in LLM Inference", 2025, on why batch size changes bits elsewhere).

Few splits are best: each is a pause of the program that takes them in turn, or sums that are written and read again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig, skinny_gemm

FEW_ROWS = (16, 32, 64)
"""Rows of a tile that has all of them."""
COLUMNS = 64
"""At a time."""
FEW_CONFIG = SkinnyConfig(block_n=64, block_k=COLUMNS, warps=4, stages=6, copy_engine=True)
FEW_GATED_CONFIG = SkinnyConfig(block_n=128, block_k=COLUMNS, warps=4, stages=4, copy_engine=True)
CONFIG, BLOCK_T = SkinnyConfig(block_n=128, block_k=COLUMNS, warps=8, stages=4, copy_engine=True), 128
"""For more rows, and the rows of a tile then."""
FLOAT32_CONFIG = SkinnyConfig(block_n=32, block_k=32, warps=8, stages=3)
OUTPUTS, ENOUGH_PROGRAMS = 64, 96
"""Outputs of a tile of few rows, and how many programs read a weight about as fast as any number: this affects the
order of sums, so it does not depend on the device that is there."""
MAX_SPLITS, LEAST_COLUMNS = 8, 256
"""Splits of a product, and columns of one of them unless it is the only one."""
MULTIPROCESSORS = 132
"""Of an H100: programs at a time."""
MOST_BYTES = 160 << 20
"""Of sums of splits that go to several programs, which the plan of memory does not know."""
RAMP, ENOUGH = 4, 1.1
"""Chunks of columns that a program could multiply while it starts and ends; and how much longer splits may take in
turn."""


class InvariantTiles(NamedTuple):
    """How a product is divided, but for what decides its bits."""

    config: SkinnyConfig
    block_t: int
    in_turn: bool
    """Whether a program takes the splits of a tile in turn."""


def invariant_linear(x_TK: Tensor, weight_NK: Tensor, fused: Fused) -> Tensor:
    """``ops.linear`` without its norm, which is a kernel of its own here."""
    N, K = weight_NK.shape
    tiles = invariant_tiles(len(x_TK), fused.width(N), K, x_TK.dtype, is_gated=fused.activation is not None)
    return skinny_gemm(x_TK, weight_NK, fused, *tiles)


def invariant_tiles(T: int, num_outputs: int, K: int, dtype: torch.dtype, is_gated: bool) -> InvariantTiles:
    """For any number of rows; how many splits there are depends on the other arguments alone."""
    enough = triton.cdiv(ENOUGH_PROGRAMS, triton.cdiv(num_outputs, OUTPUTS))
    splits = max(1, min(enough, MAX_SPLITS, K // LEAST_COLUMNS))
    config, block_t = _tile(T, dtype, is_gated)
    tiles = triton.cdiv(num_outputs, config.block_n) * triton.cdiv(T, block_t)
    chunks = triton.cdiv(K, config.block_k)
    in_turn = triton.cdiv(tiles, MULTIPROCESSORS) * (chunks + RAMP * splits)
    apart = triton.cdiv(tiles * splits, MULTIPROCESSORS) * (triton.cdiv(chunks, splits) + RAMP)
    sum_bytes = 4 * (2 if is_gated else 1) * tiles * splits * config.block_n * block_t
    takes_turns = splits > 1 and (sum_bytes > MOST_BYTES or in_turn <= ENOUGH * apart)
    return InvariantTiles(replace(config, splits=splits), block_t, takes_turns)


def _tile(T: int, dtype: torch.dtype, is_gated: bool) -> tuple[SkinnyConfig, int]:
    """The tiling for T rows, and the rows of a tile."""
    if dtype == torch.float32:
        return FLOAT32_CONFIG, FEW_ROWS[-1]
    for block_t in FEW_ROWS:
        if block_t >= T:
            return FEW_GATED_CONFIG if is_gated else FEW_CONFIG, block_t
    return CONFIG, BLOCK_T
