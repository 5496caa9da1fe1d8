"""Which kernel computes ``grouped_linear`` for a shape, and how."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from octavo.ops.grouped_linear import LARGEST_COPY, WORDS, Number, PackedGroups, chunk_of
from octavo.ops.triton.config_tables import ConfigTable
from octavo.ops.triton.grouped_gemm import GroupedGemmConfig
from octavo.ops.triton.grouped_gemv import GroupedGemvConfig
from octavo.ops.triton.launch import num_multiprocessors, shared_bytes
from octavo.ops.triton.streamed_configs import StreamedConfig, streamed_configs

GroupedConfig = StreamedConfig | GroupedGemvConfig | GroupedGemmConfig | None
"""``None`` makes the weight dense for cuBLAS."""
TABLE = ConfigTable(
    "grouped_linear", {"streamed": StreamedConfig, "gemv": GroupedGemvConfig, "gemm": GroupedGemmConfig}
)
ROW_BUCKETS = (1, 8, 16, 32, 64, 128, 256)
MOST_ROWS = 256
"""Beyond these a dense copy is worth its bytes, which are written and read once."""
ENOUGH_PROGRAMS = 256
"""Of an invariant product; affects the order of sums, so it does not depend on the device."""
MAX_SPLITS = 8
MOST_GEMV_ROWS = 8
"""Of the default; for more, an H200 is faster with ``grouped_gemm``."""


class GroupedProduct(NamedTuple):
    """The sizes of a product of rows [T, K] with a packed weight [N, K]."""

    number: Number
    groups: int
    """Of inputs; 1 for a scale per output."""
    N: int
    K: int
    is_gated: bool
    """Whether half of the N outputs are gates."""

    @property
    def outputs(self) -> int:
        return self.N // 2 if self.is_gated else self.N

    @property
    def chunks(self) -> int:
        """Of columns, that lie together in the weight."""
        return -(-self.K // chunk_of(self.number))

    def streamed(self, device: torch.device) -> list[StreamedConfig]:
        """Configurations of the kernel for one row, see ``streamed_configs``."""
        return streamed_configs(self.number, self.groups, self.K, self.outputs, self.is_gated, device)


def config_for(T: int, packed: PackedGroups, is_gated: bool, device: torch.device) -> GroupedConfig:
    """The configuration for T rows of this weight."""
    return config_of(T, GroupedProduct(packed.number, len(packed.scales_GN), *packed.shape, is_gated), device)


def config_of(T: int, product: GroupedProduct, device: torch.device) -> GroupedConfig:
    """The configuration for T rows: that of the device's tables for this bucket of rows, or a default."""
    rows = rows_bucket(T)
    if rows is not None and (key := key_of(product, rows)) in (table := TABLE.of(device)):
        found: GroupedConfig = table[key]
        return found
    return default_config(T, product, device)


def rows_bucket(T: int) -> int | None:
    """The bucket that T rows are in, which a table's entry serves; ``None`` beyond the last."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= T), None)


def key_of(product: GroupedProduct, rows: int) -> str:
    """The name of a product's entry in a table: numbers and group, or "row" for a scale per output, shape, rows."""
    number, groups, N, K, is_gated = product
    return f"{number}/{'row' if groups == 1 else K // groups} {N}x{K}{' gated' if is_gated else ''}, {rows}"


def default_config(T: int, product: GroupedProduct, device: torch.device) -> GroupedConfig:
    """Default by the size of the weight, as measurements for Qwen3-8B on an H200 suggest."""
    number, _, N, K, is_gated = product
    outputs, chunks = product.outputs, product.chunks
    multiprocessors = num_multiprocessors(device)
    if T == 1 and (streamed := product.streamed(device)):
        return streamed[0]
    if T <= MOST_GEMV_ROWS:
        return gemv_config(outputs, multiprocessors)
    if T > MOST_ROWS and N * K <= LARGEST_COPY:
        return None
    block_t = min(max(16, rows_bucket(T) or MOST_ROWS), 64 if is_gated else 128)  # gates and ups take registers twice
    block_n, warps = (64, 4) if is_gated or block_t < 128 else (128, 8)
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(T, block_t)
    programs = (3 if block_t <= 64 else 2) * multiprocessors
    splits = max(1, min(programs // tiles, chunks // 4, 16))
    stage = (block_n * (2 if is_gated else 1) * WORDS + block_t * chunk_of(number)) * 2
    stages = max(2, min(4, shared_bytes(device) // stage))
    return GroupedGemmConfig(block_n, block_t, warps, stages, splits)


def gemv_config(outputs: int, multiprocessors: int) -> GroupedGemvConfig:
    """The default for a few rows, which takes every weight."""
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
