"""Which kernel computes ``grouped_linear`` for a shape, and how."""

from __future__ import annotations

import torch
import triton

from octavo.ops.grouped_linear import LARGEST_COPY, WORDS, PackedGroups, chunk_of
from octavo.ops.triton.grouped_gemm import GroupedGemmConfig
from octavo.ops.triton.grouped_gemv import MAX_ROWS, GroupedGemvConfig
from octavo.ops.triton.launch import num_multiprocessors, shared_bytes
from octavo.ops.triton.linear_configs import bucket_of

GroupedConfig = GroupedGemvConfig | GroupedGemmConfig | None
"""``None`` makes the weight dense for cuBLAS."""
MOST_ROWS = 256
"""Beyond these a dense copy is worth its bytes, which are written and read once."""
ENOUGH_PROGRAMS = 256
"""Of an invariant product; affects the order of sums, so it does not depend on the device."""
MAX_SPLITS = 8


def config_for(T: int, packed: PackedGroups, is_gated: bool, device: torch.device) -> GroupedConfig:
    """The configuration for T rows."""
    N, K = packed.shape
    outputs = N // 2 if is_gated else N
    chunks = triton.cdiv(K, chunk_of(packed.number))
    if T <= MAX_ROWS:
        return GroupedGemvConfig(16 if is_gated else 32, split=8, warps=8, stages=3)
    if T > MOST_ROWS and N * K <= LARGEST_COPY:
        return None
    block_t = min(bucket_of(T) or MOST_ROWS, 64 if is_gated else 128)  # gates and ups take registers twice
    block_n, warps = (64, 4) if is_gated or block_t < 128 else (128, 8)
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(T, block_t)
    splits = max(1, min(2 * num_multiprocessors(device) // tiles, chunks // 4, 16))
    stage = (block_n * (2 if is_gated else 1) * WORDS + block_t * chunk_of(packed.number)) * 2
    stages = max(2, min(4, shared_bytes(device) // stage))
    return GroupedGemmConfig(block_n, block_t, warps, stages, splits)


def invariant_config(T: int, packed: PackedGroups, is_gated: bool) -> tuple[GroupedGemmConfig, bool]:
    """One configuration for any number of rows, and whether a program takes the splits of a tile in turn."""
    N, K = packed.shape
    outputs = N // 2 if is_gated else N
    chunks = triton.cdiv(K, chunk_of(packed.number))
    block_n, block_t = 64, 64
    tiles = triton.cdiv(outputs, block_n)
    splits = max(1, min(triton.cdiv(ENOUGH_PROGRAMS, tiles), chunks // 8, MAX_SPLITS))
    in_turn = splits > 1 and tiles * triton.cdiv(T, block_t) >= ENOUGH_PROGRAMS
    return GroupedGemmConfig(block_n, block_t, warps=4, stages=4, splits=splits), in_turn
