"""What one GPU can do at best: how fast it reads memory, and multiplies matrices. A roofline's numbers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from octavo_kernels.triton.graph_timing import Call, median_milliseconds, microseconds
from octavo_kernels.triton.launch import after_predecessor, launch

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


@triton.jit
def _idle_kernel(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    after_predecessor(PDL)


def measure() -> dict[str, Any]:
    """TB/s read, TFLOP/s of products of bfloat16, FP8 and INT8, with random values, and microseconds of a kernel that
    does nothing, in a chain of them; on a GPU.

    Values matter: products of zeros take less power, run at higher clocks, and say nothing of real ones.
    """
    values = torch.randn(READ_BYTES // 4, device="cuda")
    reads = [_read_milliseconds(values, block, repeats) for block, repeats in READS]
    del values
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda") for _ in range(2))
    products = {
        "matmul_tflop_s": _multiply(left.bfloat16(), right.bfloat16()),
        "fp8_tflop_s": _multiply_fp8(left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)),
        "int8_tflop_s": _multiply_int8(*((30 * each).to(torch.int8) for each in (left, right))),
    }
    flops = 2 * MATRIX**3
    return {
        "device": torch.cuda.get_device_name(),
        "read_tb_s": round(READ_BYTES / min(reads) / 1e9, 3),
        **{name: round(flops / median_milliseconds(product) / 1e9, 1) for name, product in products.items()},
        "idle_kernel_us": round(microseconds([lambda: launch(_idle_kernel, (1,), num_warps=4)] * 64, True), 2),
    }


def _multiply(left: Tensor, right: Tensor) -> Call:
    return lambda: torch.mm(left, right.T)


def _multiply_fp8(left: Tensor, right: Tensor) -> Call:
    one, kind = torch.ones((), device="cuda"), ScalingType.TensorWise
    return lambda: scaled_mm(left, right.T, one, kind, one, kind, output_dtype=torch.bfloat16, use_fast_accum=True)


def _multiply_int8(left: Tensor, right: Tensor) -> Call:
    return lambda: torch._int_mm(left, right.T)


def _read_milliseconds(values: torch.Tensor, block: int, repeats: int) -> float:
    programs = values.numel() // (block * repeats)
    sums = torch.empty(programs, device="cuda")
    return median_milliseconds(lambda: _read_kernel[(programs,)](values, sums, block, repeats, num_warps=block // 512))
