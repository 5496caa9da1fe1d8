"""Which kernel computes ``linear`` for a shape, and how.

A configuration comes from the first of these that has one: what was measured on this machine (``own_path``), the table
that is shipped for its GPU (``config_tables``), the model of cost (``linear_cost``). Shapes are those of the weights as
they are on the device, so a device that holds a part of each weight finds entries for the parts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import torch
import triton

from octavo.config import cache_dir
from octavo.ops.triton.config_tables import Kinds, parse_entry, read_section, table_path, write_section
from octavo.ops.triton.gemv import GemvConfig
from octavo.ops.triton.linear_cost import LIBRARY_LEAD, Product, gpu_of, library_microseconds, microseconds, ranked
from octavo.ops.triton.skinny_gemm import SkinnyConfig

SECTION = "linear"
ROW_BUCKETS = (1, 16, 32, 64, 128, 256)
"""Each is tuned separately; beyond the last, the library's kernels are as good as arithmetic allows."""
FEW_ROWS = 64
"""Up to here memory is the limit whatever the shape, the defaults are good, and an entry serves any rows of its bucket.

Above, only measured entries are good, and only for their exact number of rows: partial tiles cost more than full ones,
since the copy engine is slow beyond the end of a matrix (Qwen3-8B's gates: 157 us for 512 rows, 232 for 272)."""

GATED_ROWS = 128
"""For so many rows, gate and activation fused into the product gain more than cuBLAS's larger tiles (9 and 12 %)."""

LinearConfig = GemvConfig | SkinnyConfig | None
"""``None`` leaves the products to cuBLAS."""
KINDS: Kinds = {"gemv": GemvConfig, "skinny": SkinnyConfig}

logger = logging.getLogger(__name__)


def key_of(product: Product) -> str:
    """The name of a product's entry in a table."""
    gated = " gated" if product.is_gated else ""
    return f"{product.N}x{product.K}{gated}, {product.rows}"


def bucket_of(T: int) -> int | None:
    """The bucket that T rows are in, ``None`` beyond the last."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= T), None)


def config_for(T: int, N: int, K: int, is_gated: bool, device: torch.device) -> LinearConfig:
    """The configuration for T rows, or ``None`` for cuBLAS."""
    rows = bucket_of(T)
    if rows is None or (T > FEW_ROWS and rows != T):
        return None
    product = Product(N, K, rows, is_gated)
    table, key = table_of(device), key_of(product)
    return table[key] if key in table else default_config(product, device)


@functools.cache
def default_config(product: Product, device: torch.device) -> LinearConfig:
    """The configuration of the least predicted cost. Above FEW_ROWS, cuBLAS is slower for 128 rows of gates alone."""
    gpu = gpu_of(device)
    if product.rows > FEW_ROWS and not (product.is_gated and product.rows == GATED_ROWS):
        return None
    best = ranked(product, gpu)[0]
    if product.rows > FEW_ROWS or isinstance(best, GemvConfig):
        return best
    is_library = library_microseconds(product, gpu) < LIBRARY_LEAD * microseconds(product, best, gpu)
    return None if is_library else best


def table_of(device: torch.device) -> dict[str, LinearConfig]:
    """The configurations for this device: shipped ones, and over them those measured on this machine; read once."""
    is_unnumbered = device.type == "cuda" and device.index is None
    return _read_tables(torch.device("cuda", torch.cuda.current_device()) if is_unnumbered else device)


def forget_tables() -> None:
    """Read tables again when they are used next."""
    _read_tables.cache_clear()


@functools.cache
def _read_tables(device: torch.device) -> dict[str, LinearConfig]:
    if device.type != "cuda":
        return {}
    shipped = read_table(table_path(torch.cuda.get_device_name(device)))
    try:
        own = read_table(own_path(device))
    except (ValueError, OSError) as error:
        logger.warning("kernels measured on this machine are not used: %s", error)
        own = {}
    return {**shipped, **own}


def own_path(device: torch.device) -> Path:
    """The file of what was measured on this machine, by the GPU, its driver, Triton and the kernels' source."""
    sources = (Path(__file__).with_name(name) for name in ("gemv.py", "skinny_gemm.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]
    name = torch.cuda.get_device_name(device).replace(" ", "_")
    return cache_dir() / "tuned" / f"{name}-{_driver_version()}-triton{triton.__version__}-{digest}.json"


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        newest_cuda = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
        return f"cuda{newest_cuda}"


def use(entries: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """From now on use these entries, by their keys, and keep them for the next start."""
    configs = {key: parse_entry(key, fields, KINDS) for key, fields in entries.items()}
    table_of(device).update(configs)
    if device.type != "cuda" or not configs:
        return
    path = own_path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            write_table(path, {**read_table(path), **configs})
    except (OSError, ValueError) as error:
        logger.warning("measured kernels are not kept for the next start: %s", error)


def read_table(path: Path) -> Mapping[str, LinearConfig]:
    """The configurations in this file, none without it. Raises ``ValueError`` for an entry that is wrong."""
    return read_section(path, SECTION, KINDS)


def write_table(path: Path, configs: Mapping[str, LinearConfig]) -> None:
    """Write configurations in the form that ``read_table`` reads."""
    write_section(path, SECTION, configs, KINDS)
