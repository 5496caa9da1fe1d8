"""What one GPU can do at best: how fast it reads memory, and multiplies matrices. A roofline's two numbers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from octavo_kernels.triton.graph_timing import median_milliseconds

READ_BYTES = 8 << 30
"""Far more than any cache holds."""
MATRIX = 8192
READS = ((2048, 64), (4096, 32), (4096, 128), (8192, 64))
"""Values a program reads at once, and how often, of which the fastest counts."""


@triton.jit
def _read_kernel(values, sums, BLOCK: tl.constexpr, REPEATS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    start = program.to(tl.int64) * BLOCK * REPEATS
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.range(0, REPEATS, num_stages=4):
        total += tl.load(values + start + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total))


def measure() -> dict[str, Any]:
    """TB/s read and TFLOP/s of bfloat16 products, with random values, on a GPU.

    Values matter: products of zeros take less power, run at higher clocks, and say nothing of real ones.
    """
    values = torch.randn(READ_BYTES // 4, device="cuda")
    reads = [_read_milliseconds(values, block, repeats) for block, repeats in READS]
    del values
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = median_milliseconds(lambda: torch.mm(left, right))
    return {
        "device": torch.cuda.get_device_name(),
        "read_tb_s": round(READ_BYTES / min(reads) / 1e9, 3),
        "matmul_tflop_s": round(2 * MATRIX**3 / product / 1e9, 1),
    }


def _read_milliseconds(values: torch.Tensor, block: int, repeats: int) -> float:
    programs = values.numel() // (block * repeats)
    sums = torch.empty(programs, device="cuda")
    return median_milliseconds(lambda: _read_kernel[(programs,)](values, sums, block, repeats, num_warps=block // 512))
