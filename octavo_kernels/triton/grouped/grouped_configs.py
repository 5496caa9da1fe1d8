"""Which kernel computes ``grouped_linear`` for a shape, and how."""

from __future__ import annotations

import torch
import triton

from octavo.ops.linear.grouped_linear import LARGEST_COPY, WORDS, PackedGroups, chunk_of
from octavo_kernels.hopper import pipelined_configs, streamed_configs
from octavo_kernels.hopper.pipelined_configs import PipelinedConfig
from octavo_kernels.hopper.streamed_configs import StreamedConfig
from octavo_kernels.triton.config_tables import ConfigTable
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import num_multiprocessors, shared_bytes

GroupedConfig = StreamedConfig | PipelinedConfig | GroupedGemvConfig | GroupedGemmConfig | None
"""``None`` makes the weight dense for cuBLAS."""
TABLE = ConfigTable(
    "grouped_linear",
    {"streamed": StreamedConfig, "pipelined": PipelinedConfig, "gemv": GroupedGemvConfig, "gemm": GroupedGemmConfig},
)
ROW_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)
"""Beyond these a dense copy is worth its bytes, which are written and read once."""
MOST_GEMM_ROWS = 256
"""Beyond these it is where ``pipelined_gemm`` cannot be used."""
ENOUGH_PROGRAMS = 256
"""Of an invariant product; affects the order of sums, so it does not depend on the device."""
MAX_SPLITS = 8
MOST_GEMV_ROWS = 8
"""Of the default where ``pipelined_gemm`` cannot be used; for more, an H200 is faster with ``grouped_gemm``."""


def config_for(T: int, product: GroupedProduct, device: torch.device) -> GroupedConfig:
    """The configuration for T rows: that of the device's tables for this bucket of rows, or a default.

    Tables do not know the types of activations and scales: an entry that cannot be used for these is passed over.
    """
    rows = rows_bucket(T)
    if rows is not None and (key := key_of(product, rows)) in (table := TABLE.of(device)):
        found: GroupedConfig = table[key]
        if _can_use(found, T, product, device):
            return found
    return default_config(T, product, device)


def _can_use(config: GroupedConfig, T: int, product: GroupedProduct, device: torch.device) -> bool:
    if isinstance(config, StreamedConfig):
        return T == 1 and streamed_configs.takes(product, device)
    if isinstance(config, PipelinedConfig):
        return pipelined_configs.takes(product, device) and pipelined_configs.fits(config, product, device)
    return True


def rows_bucket(T: int) -> int | None:
    """The bucket that T rows are in, which a table's entry serves; ``None`` beyond the last."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= T), None)


def key_of(product: GroupedProduct, rows: int) -> str:
    """The name of a product's entry in a table: numbers and group, or "row" for a scale per output, shape, rows."""
    number, groups, N, K, is_gated, *_ = product
    return f"{number}/{'row' if groups == 1 else K // groups} {N}x{K}{' gated' if is_gated else ''}, {rows}"


def default_config(T: int, product: GroupedProduct, device: torch.device) -> GroupedConfig:
    """Default by the size of the weight, as measurements for Qwen3-8B on an H200, and on an H100, suggest."""
    rows = rows_bucket(T)
    if T == 1 and (streamed := streamed_configs.streamed_configs(product, device)):
        return streamed[0]
    if rows is not None and (pipelined := pipelined_configs.pipelined_configs(product, rows, device)):
        return pipelined[0]
    if T <= MOST_GEMV_ROWS:
        return _gemv_config(product.outputs, num_multiprocessors(device))
    if T > MOST_GEMM_ROWS and product.N * product.K <= LARGEST_COPY:
        return None
    return _gemm_config(T, product, device)


def _gemm_config(T: int, product: GroupedProduct, device: torch.device) -> GroupedGemmConfig:
    is_gated = product.is_gated
    block_t = min(
        max(16, rows_bucket(T) or MOST_GEMM_ROWS), 64 if is_gated else 128
    )  # gates and ups take registers twice
    block_n, warps = (64, 4) if is_gated or block_t < 128 else (128, 8)
    tiles = triton.cdiv(product.outputs, block_n) * triton.cdiv(T, block_t)
    programs = (3 if block_t <= 64 else 2) * num_multiprocessors(device)
    splits = max(1, min(programs // tiles, product.chunks // 4, 16))
    stage = (block_n * product.weights * WORDS + block_t * chunk_of(product.number)) * 2
    stages = max(2, min(4, shared_bytes(device) // stage))
    return GroupedGemmConfig(block_n, block_t, warps, stages, splits)


def _gemv_config(outputs: int, multiprocessors: int) -> GroupedGemvConfig:
    is_small = triton.cdiv(outputs, 32) < 2 * multiprocessors
    return GroupedGemvConfig(32, split=8 if is_small else 4, warps=4, stages=3, release="never", prefetch=False)


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
