"""Which kernel computes ``linear`` for a shape, and how: a table for each GPU that was measured, defaults for the rest.

Tables are ``configs/<name of the GPU>.json``, written by ``octavo bench kernels --tune``::

    {"linear": {"6144x4096, 16": {"kernel": "skinny", "block_n": 64, ...}, ...}}

with one entry for each N x K of the weight and bucket of rows. An entry's fields are those of its configuration.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from octavo.ops.triton.gemv import GemvConfig
from octavo.ops.triton.launch import num_multiprocessors
from octavo.ops.triton.skinny_gemm import SkinnyConfig

FOLDER = Path(__file__).parent / "configs"
ROW_BUCKETS = (1, 16, 32, 64, 128, 256)
"""Each is tuned separately; beyond the last, the library's kernels are as good as arithmetic allows."""
FEW_ROWS = 64
"""Up to here memory is the limit whatever the shape, the defaults are good, and an entry serves any rows of its bucket.

Above, only measured entries are good, and only for their exact number of rows: partial tiles cost more than full ones,
since the copy engine is slow beyond the end of a matrix (Qwen3-8B's gates: 157 us for 512 rows, 232 for 272)."""

LinearConfig = GemvConfig | SkinnyConfig | None
"""``None`` leaves the products to cuBLAS."""
_KINDS: dict[str, Any] = {"gemv": GemvConfig, "skinny": SkinnyConfig}


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


def table_path(gpu: str) -> Path:
    """Where the table of the GPU of this name is kept."""
    return FOLDER / f"{gpu.replace(' ', '_')}.json"


def read_table(path: Path) -> Mapping[str, LinearConfig]:
    """The table in this file, empty if there is none. Raises ``ValueError`` for an entry that is wrong."""
    entries = json.loads(path.read_text())["linear"] if path.is_file() else {}
    return {shape: _parse(shape, fields, path) for shape, fields in entries.items()}


def write_table(path: Path, configs: Mapping[str, LinearConfig]) -> None:
    """Write a table in the form that ``read_table`` reads, an entry a line."""
    lines = [
        f"    {json.dumps(str(shape))}: {json.dumps(_fields(config))}" for shape, config in sorted(configs.items())
    ]
    path.write_text('{\n  "linear": {\n' + ",\n".join(lines) + "\n  }\n}\n")


def _fields(config: LinearConfig) -> dict[str, Any]:
    kind = next((name for name, type_ in _KINDS.items() if isinstance(config, type_)), "cublas")
    return {"kernel": kind, **(asdict(config) if config else {})}


def _parse(shape: str, fields: Mapping[str, Any], path: Path) -> LinearConfig:
    kind = str(fields.get("kernel"))
    rest = {name: value for name, value in fields.items() if name != "kernel"}
    try:
        if kind == "cublas" and not rest:
            return None
        config: LinearConfig = _KINDS[kind](**rest)
    except (KeyError, TypeError) as error:
        kinds = ", ".join([*_KINDS, "cublas"])
        raise ValueError(f"{path.name}: linear, {shape}: {error}; kernels are {kinds}, with their own fields") from None
    return config
