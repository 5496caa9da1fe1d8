"""``linear`` whose rows do not depend on the number of rows or on the other rows, to the bit.

One matrix product serves every number of rows: tiles of one form, and sums in one order, fixed by the shape of the
weight alone. What may vary is which program does it: where there are few tiles, the splits of a tile's columns go to
several programs, and where there are many, one program takes them in turn (He et al., "Defeating Nondeterminism in
LLM Inference", 2025, on why batch size changes bits elsewhere).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from octavo.ops.linear import Fused
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig, skinny_gemm

BLOCK_T = 64
CONFIG = SkinnyConfig(block_n=128, block_k=64, warps=8, stages=4, copy_engine=True)
FLOAT32_CONFIG = SkinnyConfig(block_n=32, block_k=32, warps=8, stages=3)
ENOUGH_PROGRAMS = 256
"""Programs of one product; affects the order of sums, so it does not depend on the device."""
MAX_SPLITS = 8


def invariant_linear(x_TK: Tensor, weight_NK: Tensor, fused: Fused) -> Tensor:
    """``ops.linear`` without its norm, which is a kernel of its own here."""
    N, K = weight_NK.shape
    config, in_turn = invariant_config(len(x_TK), fused.width(N), K, x_TK.dtype)
    return skinny_gemm(x_TK, weight_NK, fused, config, BLOCK_T, in_turn)


def invariant_config(T: int, num_outputs: int, K: int, dtype: torch.dtype) -> tuple[SkinnyConfig, bool]:
    """One configuration for any number of rows, and whether a program takes the splits of a tile in turn."""
    config = FLOAT32_CONFIG if dtype == torch.float32 else CONFIG
    tiles = triton.cdiv(num_outputs, config.block_n)
    splits = max(1, min(triton.cdiv(ENOUGH_PROGRAMS, tiles), K // (8 * config.block_k), MAX_SPLITS))
    in_turn = splits > 1 and tiles * triton.cdiv(T, BLOCK_T) >= ENOUGH_PROGRAMS
    return replace(config, splits=splits), in_turn
