"""How good the kernels for CUDA devices are: time, share of what the device can do, and error.

Times are those of a CUDA graph whose calls read other weights each, with programmatic dependent launch.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import rms_norm, silu_and_mul
from octavo_bench.device import ceilings
from octavo_bench.device.kernel_cases import head_case, layer_cases
from octavo_bench.device.linear_case import DTYPE, EPS, LinearCase, Weights
from octavo_kernels.triton.graph_timing import microseconds
from octavo_kernels.triton.launch import pdl
from octavo_kernels.triton.linear.linear_configs import config_for

ALONE_BYTES = 400_000_000
"""Weights or rows that take turns: several times any cache."""
DEVICE = torch.device("cuda")


def measure(models: Sequence[str], rows: Sequence[int], deadline: float = float("inf")) -> dict[str, Any]:
    """Figures of the kernels of these models' layers for each number of rows, each beside cuBLAS with kernels around.

    What there is no time for in ``deadline`` seconds is left out. Raises ``ConfigError`` for models that are not known.
    """
    cases = [[*layer_cases(model), head_case(model)] for model in models]
    end, limits = time.monotonic() + deadline, ceilings.measure()
    figures = itertools.takewhile(lambda figure: time.monotonic() < end, figures_of(cases, rows, limits))
    return {**limits, "rows": list(figures)}


def figures_of(
    models: Sequence[Sequence[LinearCase]], rows: Sequence[int], limits: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A record for each kernel, model and number of rows."""
    weights = Weights(4 * ALONE_BYTES + 2 * max(c.num_bytes(0) for maps in models for c in maps), DEVICE)
    for T in rows:
        for maps in models:
            yield from (_linear(case, T, weights, limits) for case in maps)
            yield _rms_norm(maps[0], T, limits)
            yield _silu_and_mul(maps[2], T, limits)


def _linear(case: LinearCase, T: int, weights: Weights, limits: Mapping[str, Any]) -> dict[str, Any]:
    config = config_for(T, case.N, case.K, case.activation is not None, DEVICE)
    turns = weights.of(case.N, case.K, ALONE_BYTES)
    given = case.operands(T, DEVICE)
    taken, cublas = (
        microseconds([functools.partial(case.run, given, weight, c) for weight in turns], with_pdl=True)
        for c in (config, None)
    )
    products = microseconds([functools.partial(functional.linear, given.x_TK, weight) for weight in turns], False)
    with pdl():
        error = case.error(T, turns[0], lambda given: case.run(given, turns[0], config))
    return {
        "model": case.model,
        "kernel": f"linear {case.name}",
        "shape": f"{case.N}x{case.K}",
        "T": T,
        "config": str(config),
        **shares(taken, case.num_bytes(T), 2 * T * case.N * case.K, limits),
        "error": error,
        "cublas_and_kernels_us": round(cublas, 2),
        "cublas_products_us": round(products, 2),
    }


def _rms_norm(case: LinearCase, T: int, limits: Mapping[str, Any]) -> dict[str, Any]:
    weight_D = torch.rand(case.K, device=DEVICE, dtype=DTYPE)

    def expected(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight_D.double()

    def run(x: Tensor) -> Tensor:
        return rms_norm(x, weight_D, EPS)

    return {"model": case.model, "kernel": "rms_norm", **_by_rows(run, expected, T, case.K, case.K, limits)}


def _silu_and_mul(case: LinearCase, T: int, limits: Mapping[str, Any]) -> dict[str, Any]:
    def expected(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return {
        "model": case.model,
        "kernel": "silu_and_mul",
        **_by_rows(silu_and_mul, expected, T, case.N, case.outputs, limits),
    }


def _by_rows(
    run: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor], Tensor],
    T: int,
    width: int,
    outputs: int,
    limits: Mapping[str, Any],
) -> dict[str, Any]:
    """Figures of a kernel from rows to rows."""
    num_bytes = T * (width + outputs) * DTYPE.itemsize
    turns = [torch.randn(T, width, device=DEVICE, dtype=DTYPE) for _ in range(min(64, 2 + ALONE_BYTES // num_bytes))]
    taken = microseconds([functools.partial(run, x) for x in turns], with_pdl=True)
    torch.full((T, outputs), float("nan"), device=DEVICE, dtype=DTYPE)
    with pdl():
        out = run(turns[0]).double()
    reference = expected(turns[0].double())
    error = float((out - reference).norm() / reference.norm())
    return {"T": T, **shares(taken, num_bytes, 0, limits), "error": error}


def shares(taken: float, num_bytes: int, operations: int, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds, and what they are in terms of the device's limits."""
    tb_s, tflop_s = num_bytes / taken / 1e6, operations / taken / 1e6
    return {
        "microseconds": round(taken, 2),
        "bytes": num_bytes,
        "tb_s": round(tb_s, 3),
        "of_read": round(tb_s / limits["read_tb_s"], 3),
        "of_matmul": round(tflop_s / limits["matmul_tflop_s"], 3),
    }
