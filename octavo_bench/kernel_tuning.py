"""Tables of kernels for shapes of models: ``octavo tune`` for a list of models without their weights, more thoroughly.

Kernels are compiled by processes of their own while others are measured. What is found goes into the table that is
shipped for the GPU.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch

from octavo_bench.linear_case import Weights
from octavo_kernels.triton.config_tables import forget_tables, table_path
from octavo_kernels.triton.launch import compiling, pdl
from octavo_kernels.triton.linear.gemv import GemvConfig
from octavo_kernels.triton.linear.linear_configs import TABLE, LinearConfig, bucket_of, key_of
from octavo_kernels.triton.tuning.linear_cost import Product
from octavo_kernels.triton.tuning.linear_uses import LinearUse
from octavo_kernels.triton.tuning.product_tuning import fastest, measure

CANDIDATES = 16
"""More than a start of the engine has time for."""
MOST_BYTES = 6_000_000_000
"""Of weights: two of the largest heads."""
TURN_BYTES = 400_000_000
Job = tuple[LinearUse, int, LinearConfig]


def tune(
    uses: Iterable[LinearUse],
    rows: Sequence[int],
    keep: Callable[[], object] = lambda: None,
    deadline: float = float("inf"),
) -> list[dict[str, Any]]:
    """Find the best configurations for these numbers of rows and write them into the device's shipped table.

    All uses for the first number of rows come first. What could not be done within ``deadline`` seconds is left as it
    was. Returns all times on the way. ``keep`` is called whenever the table has grown.
    """
    device, started = torch.device("cuda"), time.perf_counter()
    path = table_path(torch.cuda.get_device_name(device))
    buckets = dict.fromkeys(bucket for bucket in map(bucket_of, rows) if bucket is not None)
    of_product: dict[Product, LinearUse] = {}
    for use in uses:
        of_product.setdefault(use.product(0), use)
    turns = list(itertools.product(buckets, of_product.values()))
    compiler, weights = Compiler(), Weights(MOST_BYTES, device)
    kernels = [compiler.start((use, n, c) for c in use.candidates(n, device, CANDIDATES)) for n, use in turns]
    notes: list[dict[str, Any]] = []
    for (bucket, use), compiled in zip(turns, kernels, strict=True):
        if time.perf_counter() - started > deadline:
            break
        for kernel in compiled:
            kernel.result()
        configs = use.candidates(bucket, device, CANDIDATES)
        with torch.inference_mode():
            timed = measure(use, bucket, configs, weights.of(use.N, use.K, TURN_BYTES), device)
        key = key_of(use.product(bucket))
        notes += [{"shape": key, "config": str(c), "microseconds": round(taken, 2)} for taken, c in timed]
        TABLE.write(path, {**TABLE.read(path), key: fastest(timed, use.present(bucket, device))})
        keep()
    forget_tables()
    compiler.close()
    return notes


class Compiler:
    """Compiles the kernels of configurations in processes of their own, into Triton's cache on disk."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pool = ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), context)
        self._started: dict[object, Future[None]] = {}

    def start(self, jobs: Iterable[Job]) -> list[Future[None]]:
        """Start to compile what these launch, each kernel once; all that there is to wait for."""
        found = {}
        for job in jobs:
            key = kernel_key(*job)
            if key not in self._started:
                self._started[key] = self._pool.submit(_compile, *job)
            found[key] = self._started[key]
        return list(found.values())

    def close(self) -> None:
        """Leave what has not begun."""
        self._pool.shutdown(cancel_futures=True)


def kernel_key(use: LinearUse, rows: int, config: LinearConfig) -> tuple[object, ...]:
    """What differs between kernels: a GEMV is compiled for its columns and for whether its rows come out even."""
    parts = (rows, config, use.dtype, use.has_norm, use.has_residual, use.has_bias, use.activation)
    if isinstance(config, GemvConfig):
        return (*parts, use.K, use.product(rows).outputs % config.rows)
    return (*parts, None if config is None else use.K % config.block_k)


def _compile(use: LinearUse, rows: int, config: LinearConfig) -> None:
    weight = torch.empty(use.N, use.K, dtype=use.dtype, device="cuda")
    with torch.inference_mode(), pdl(), compiling(1):
        use.run(use.operands(rows, weight.device), weight, config)
