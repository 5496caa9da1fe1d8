"""What a configuration of ``linear`` costs on a GPU, predicted from its sizes, for shapes that nobody has measured.

The time of a product of few rows is that of the slowest of three: all bytes at the memory's rate; the bytes of the
busiest multiprocessor at the most that one can take; the waits of a program for its chunks of columns, of which
``stages - 1`` are on their way at once. To this come a start, and what splitting the columns costs. Seven numbers are
fitted to all measurements (``FITTED``), the others are properties of the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from triton.runtime import driver

from octavo_kernels.triton.launch import HOPPER, num_multiprocessors, shared_bytes
from octavo_kernels.triton.linear.gemv import GemvConfig
from octavo_kernels.triton.linear.skinny_gemm import MAX_TILES, SHARED_BY_COMPILER, SkinnyConfig

REGISTERS = 65536
"""Of a multiprocessor; of 32 bits."""
MOST_WARPS = 64
"""Of a multiprocessor."""
MOST_SUMS = 128
"""Sums that a thread keeps in registers."""
OTHER_REGISTERS = 48
"""Registers of a thread that do not hold sums."""
LONG_ROW = 8192
"""From so many columns on, a GEMV's tile of few long rows is faster than one of many short ones."""
MOST_SPLITS = 16
DEEP = 384
"""Columns in flight from which it pays to prefetch some."""
PREFETCHED = 256
"""So many, or two chunks if that is less."""
LEAST_BANDWIDTH = 0.1
"""TB/s, for drivers that do not know their memory."""


@dataclass(frozen=True)
class Gpu:
    """Properties of a device that decide how long products take."""

    multiprocessors: int
    bandwidth: float
    """Bytes a microsecond, by the clock and the width of the memory."""
    shared_bytes: int
    """Of a program, and nearly of a multiprocessor."""
    has_copy_engine: bool


@dataclass(frozen=True)
class CostConstants:
    """Numbers fitted to measurements; times in microseconds."""

    start: float
    """Of a kernel, with those before and after it."""
    share: float
    """Of the bandwidth by clock and width, what reading reaches."""
    multiprocessor: float
    """Bytes a microsecond that one multiprocessor takes at most."""
    latency: float
    """Until a chunk of columns arrives."""
    split: float
    """Of splitting the columns, in addition to reading and writing the partial sums."""
    sums_share: float
    """Of the bandwidth, for the sums of splits."""
    prefetched: float
    """Of the latency, what prefetching saves at the start."""


FITTED = CostConstants(2.15, 0.837, 94_500.0, 0.93, 0.375, 0.366, 0.457)
"""To the 1,722 measurements of ``skinny`` for 85 matrices on an H200, by the loss of ``tests.ops.triton.cost_fit``."""
LIBRARY_START, LIBRARY_SHARE, LIBRARY_COLUMN = 4.4, 0.804, 1.16e-4
"""Of cuBLAS, fitted to 139 products of 16 to 64 rows: microseconds, share of the bandwidth, microseconds a column."""
LIBRARY_LEAD = 0.95
"""Of the time of the best other kernel, what cuBLAS's must be below to be chosen.

Its kernels overlap with neither the kernel before nor the one after, which a product alone does not show: in a chain of
layers, others that are up to 5 % slower alone were the faster ones."""
SHARPNESS = 4
"""The norm that joins the three times: they overlap, but not completely."""

GEMV = [
    GemvConfig(4, 1024, 4),
    GemvConfig(2, 2048, 4),
    GemvConfig(1, 2048, 4),
    GemvConfig(4, 2048, 4, programs=4),
    GemvConfig(2, 2048, 4, programs=8),
    GemvConfig(2, 4096, 8, programs=4),
]
TILES = {
    16: [(16, 64, 256, 4, 3), (16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 64, 64, 4, 6), (16, 128, 64, 4, 5)],
    32: [(32, 64, 128, 4, 4), (32, 64, 128, 4, 3), (32, 64, 64, 4, 5), (32, 128, 64, 4, 4)],
    64: [(64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 128, 128, 8, 3), (64, 64, 64, 4, 4)],
    128: [(128, 128, 64, 8, 4), (128, 64, 128, 8, 3), (128, 64, 64, 4, 4)],
    256: [(128, 128, 64, 8, 4), (256, 64, 64, 8, 4), (128, 64, 64, 4, 4)],
}
"""Rows, outputs and columns of a tile, warps and stages, by the bucket of rows."""


@dataclass(frozen=True)
class Product:
    """A product for up to ``rows`` rows, [rows, K] times [N, K]."""

    N: int
    K: int
    rows: int
    is_gated: bool = False
    """Whether half of the N outputs are gates."""

    @property
    def outputs(self) -> int:
        return self.N // 2 if self.is_gated else self.N


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The properties of a device; on the CPU, where only the interpreter runs, those of a small one."""
    if device.type != "cuda":
        return Gpu(num_multiprocessors(device), 1e6, shared_bytes(device), has_copy_engine=True)
    index = torch.cuda.current_device() if device.index is None else device.index
    found = driver.active.utils.get_device_properties(index)
    bandwidth = 2 * found["mem_clock_rate"] * 1e3 * found["mem_bus_width"] / 8 / 1e6  # both edges of the clock, in kHz
    has_copy_engine = torch.cuda.get_device_capability(device) >= HOPPER
    return Gpu(
        num_multiprocessors(device), max(bandwidth, LEAST_BANDWIDTH * 1e6), shared_bytes(device), has_copy_engine
    )


def ranked(product: Product, gpu: Gpu) -> list[GemvConfig] | list[SkinnyConfig]:
    """Configurations for a product on this GPU, the one that should be the fastest first."""
    if product.rows == 1:
        widest = triton.next_power_of_2(product.K)
        first = GEMV[1] if product.K >= LONG_ROW else GEMV[0]
        return list(dict.fromkeys(replace(c, block_k=min(c.block_k, widest)) for c in (first, *GEMV)))
    return sorted(dict.fromkeys(_skinny(product, gpu)), key=lambda config: microseconds(product, config, gpu))


def _skinny(product: Product, gpu: Gpu) -> Iterator[SkinnyConfig]:
    """Those whose tiles fit into shared memory and registers, with every number of splits that may be worth it."""
    weights = 2 if product.is_gated else 1
    largest = max(TILES)
    for block_t, block_n, block_k, warps, most_stages in TILES[min(product.rows, largest)]:
        chunk = (weights * block_n + block_t) * block_k * 2
        stages = min(most_stages, (gpu.shared_bytes - SHARED_BY_COMPILER) // chunk)
        if stages < 2 or weights * block_n * block_t > MOST_SUMS * 32 * warps:
            continue
        tiles = triton.cdiv(product.outputs, block_n) * triton.cdiv(product.rows, block_t)
        fixed_t = block_t if product.rows > 64 else 0
        for splits in range(1, MOST_SPLITS + 1):
            is_worth_it = 3 * splits * block_k <= product.K and tiles * splits <= 4 * gpu.multiprocessors
            if splits > 1 and not (is_worth_it and tiles <= MAX_TILES):
                continue
            config = SkinnyConfig(
                block_n, block_k, warps, stages, splits, copy_engine=gpu.has_copy_engine, block_t=fixed_t
            )
            yield replace(config, prefetch=min(2, PREFETCHED // block_k)) if stages * block_k >= DEEP else config


@dataclass(frozen=True)
class ColumnLoop:
    """How the programs of a kernel read their columns, a chunk after the other."""

    programs: int
    chunks: int
    """Of a program."""
    chunk_bytes: int
    """In shared memory, of the weight and the rows."""
    stages: int
    """Chunks in shared memory at once, and on their way to it."""
    warps: int
    sums: int
    """Of a program, in float32."""


def microseconds(product: Product, config: SkinnyConfig, gpu: Gpu, fitted: CostConstants = FITTED) -> float:
    """The predicted time of a product."""
    block_t = config.block_t or product.rows
    weights = 2 if product.is_gated else 1
    tiles = triton.cdiv(product.outputs, config.block_n) * triton.cdiv(product.rows, block_t)
    loop = ColumnLoop(
        tiles * config.splits,
        triton.cdiv(product.K, config.block_k * config.splits),
        (weights * config.block_n + block_t) * config.block_k * 2,
        config.stages,
        config.warps,
        weights * config.block_n * block_t,
    )
    taken = loop_microseconds(2 * product.K * (product.N + product.rows), loop, config.splits > 1, gpu, fitted)
    return taken - (fitted.latency * fitted.prefetched if config.prefetch else 0.0)


def loop_microseconds(
    num_bytes: int, loop: ColumnLoop, is_split: bool, gpu: Gpu, fitted: CostConstants = FITTED
) -> float:
    """The predicted time of a kernel that reads so many bytes, and adds the sums of splits, in this way."""
    registers = min(255, OTHER_REGISTERS + loop.sums // (32 * loop.warps))
    at_once = min(
        gpu.shared_bytes // (loop.stages * loop.chunk_bytes),
        MOST_WARPS // loop.warps,
        REGISTERS // (registers * 32 * loop.warps),
    )
    waves = triton.cdiv(loop.programs, gpu.multiprocessors * max(1, at_once))
    times = (
        num_bytes / (gpu.bandwidth * fitted.share),
        triton.cdiv(loop.programs, gpu.multiprocessors) * loop.chunks * loop.chunk_bytes / fitted.multiprocessor,
        waves * loop.chunks / (loop.stages - 1) * fitted.latency,
    )
    taken = sum(time**SHARPNESS for time in times) ** (1 / SHARPNESS)
    taken += fitted.start + fitted.latency
    if is_split:
        taken += fitted.split + 2 * 4 * loop.programs * loop.sums / (gpu.bandwidth * fitted.sums_share)
    return float(taken)


def library_microseconds(product: Product, gpu: Gpu) -> float:
    """The predicted time of cuBLAS for few rows."""
    read = 2 * product.K * (product.N + product.rows) / (gpu.bandwidth * LIBRARY_SHARE)
    return LIBRARY_START + read + LIBRARY_COLUMN * product.K
