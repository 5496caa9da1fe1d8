"""Which kernel computes ``linear`` for a shape, and how: a table for each GPU that was measured, defaults for the rest.

Tables (``config_tables``) are written by ``octavo bench kernels --tune``, with one entry for each N x K of the weight
and bucket of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from octavo.ops.triton.config_tables import Kinds, read_section, table_path, write_section
from octavo.ops.triton.gemv import GemvConfig
from octavo.ops.triton.launch import num_multiprocessors
from octavo.ops.triton.skinny_gemm import SkinnyConfig

SECTION = "linear"
ROW_BUCKETS = (1, 16, 32, 64, 128, 256)
"""Each is tuned separately; beyond the last, the library's kernels are as good as arithmetic allows."""
FEW_ROWS = 64
"""Up to here memory is the limit whatever the shape, the defaults are good, and an entry serves any rows of its bucket.

Above, only measured entries are good, and only for their exact number of rows: partial tiles cost more than full ones,
since the copy engine is slow beyond the end of a matrix (Qwen3-8B's gates: 157 us for 512 rows, 232 for 272)."""

LinearConfig = GemvConfig | SkinnyConfig | None
"""``None`` leaves the products to cuBLAS."""
_KINDS: Kinds = {"gemv": GemvConfig, "skinny": SkinnyConfig}


class Shape(NamedTuple):
    """Key of a configuration."""

    N: int
    K: int
    rows: int
    """One of ROW_BUCKETS."""

    def __str__(self) -> str:
        return f"{self.N}x{self.K}, {self.rows}"


def bucket_of(T: int) -> int | None:
    """The bucket that T rows are in, ``None`` beyond the last."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= T), None)


def config_for(T: int, N: int, K: int, has_norm: bool, is_gated: bool, device: torch.device) -> LinearConfig:
    """The configuration for T rows, or ``None`` for cuBLAS."""
    rows = bucket_of(T)
    if rows is None or (T > FEW_ROWS and rows != T):
        return None
    table = table_of(device)
    shape = str(Shape(N, K, rows))
    return table[shape] if shape in table else default_config(Shape(N, K, rows), has_norm, is_gated, device)


def default_config(shape: Shape, has_norm: bool, is_gated: bool, device: torch.device) -> LinearConfig:
    """Default by the size of the weight, from the best configurations of the measured shapes."""
    N, K, rows = shape
    if rows == 1:
        if has_norm:  # its programs take the norm once, so few that walk
            return GemvConfig(2, 4096, warps=8, programs=4) if K > 2048 else GemvConfig(4, 2048, warps=4, programs=4)
        return GemvConfig(2, 2048, warps=4) if K > 8192 else GemvConfig(4, 1024, warps=4)
    if rows > FEW_ROWS:
        return None
    tiles, block_k = triton.cdiv(N // 2 if is_gated else N, 64), 64
    splits = max(1, min(3 * num_multiprocessors(device) // tiles, K // (4 * block_k), 16))
    return SkinnyConfig(64, block_k, warps=4, stages=4 if is_gated else 5, splits=splits, copy_engine=True)


@functools.cache
def table_of(device: torch.device) -> Mapping[str, LinearConfig]:
    """The table of this device, read once."""
    return read_table(table_path(torch.cuda.get_device_name(device))) if device.type == "cuda" else {}


def read_table(path: Path) -> Mapping[str, LinearConfig]:
    """The configurations in this file, none without it. Raises ``ValueError`` for an entry that is wrong."""
    return read_section(path, SECTION, _KINDS)


def write_table(path: Path, configs: Mapping[str, LinearConfig]) -> None:
    """Write configurations in the form that ``read_table`` reads."""
    write_section(path, SECTION, configs, _KINDS)
