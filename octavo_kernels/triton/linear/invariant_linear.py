"""``linear`` whose rows do not depend on the number of rows or on the other rows, to the bit.

A number's sum is taken in one order, fixed by the shape of the weight alone: in how many splits its columns are added
up, and how many columns at a time. What may vary with the number of rows is who does it: tiles may be larger, and the
splits of a tile's columns go to several programs or, where there are many tiles, to one that takes them in turn (He et
al., "Defeating Nondeterminism in LLM Inference", 2025, on why batch size changes bits elsewhere).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from octavo.ops.linear import Fused
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig, skinny_gemm

CONFIG = SkinnyConfig(block_n=128, block_k=64, warps=8, stages=4, copy_engine=True)
FLOAT32_CONFIG = SkinnyConfig(block_n=32, block_k=32, warps=8, stages=3)
FEW_ROWS, BLOCK_T = 64, 128
"""Rows of a tile, for so many and for more."""
MULTIPROCESSORS = 132
"""Among which few rows are divided, as an H100 has them: this affects the order of sums, so that it does not depend on
the device that is there."""
MAX_SPLITS = 8
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
    """For any number of rows; the order of sums depends on the other arguments alone."""
    config = FLOAT32_CONFIG if dtype == torch.float32 else CONFIG
    chunks, at_once = triton.cdiv(K, config.block_k), (1 if is_gated else 2) * MULTIPROCESSORS
    few = triton.cdiv(num_outputs, config.block_n)
    splits = min(range(1, MAX_SPLITS + 1), key=lambda s: _time_apart(few, chunks, s, at_once))
    config, block_t = replace(config, splits=splits), FEW_ROWS
    if T > FEW_ROWS and dtype != torch.float32:
        # Sums that a program adds to others take registers once more: so gates and ups are fewer then.
        config, block_t = replace(config, block_n=64 if is_gated and splits > 1 else config.block_n), BLOCK_T
    tiles = triton.cdiv(num_outputs, config.block_n) * triton.cdiv(T, block_t)
    in_turn = triton.cdiv(tiles, at_once) * (chunks + RAMP * splits)
    apart, sums = _time_apart(tiles, chunks, splits, at_once), tiles * splits * config.block_n * block_t
    sum_bytes = 4 * (2 if is_gated else 1) * sums
    return InvariantTiles(config, block_t, splits > 1 and (sum_bytes > MOST_BYTES or in_turn <= ENOUGH * apart))


def _time_apart(tiles: int, chunks: int, splits: int, at_once: int) -> int:
    """The time in which so many programs at once do the splits of these tiles, in that of a chunk of columns."""
    return int(triton.cdiv(tiles * splits, at_once) * (triton.cdiv(chunks, splits) + RAMP))
