"""Which kernel computes ``linear`` for a shape, and how.

A configuration comes from the first of these that has one: what was measured on this machine, the table that is shipped
for its GPU (both ``config_tables``), the model of cost (``linear_cost``). Shapes are those of the weights as
they are on the device, so a device that holds a part of each weight finds entries for the parts.
"""

from __future__ import annotations

import functools

import torch

from octavo_kernels.triton.config_tables import ConfigTable
from octavo_kernels.triton.linear.gemv import GemvConfig
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig
from octavo_kernels.triton.tuning.linear_cost import (
    LIBRARY_LEAD,
    Product,
    gpu_of,
    library_microseconds,
    microseconds,
    ranked,
)

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
TABLE = ConfigTable("linear", {"gemv": GemvConfig, "skinny": SkinnyConfig})


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
    table, key = TABLE.of(device), key_of(product)
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
