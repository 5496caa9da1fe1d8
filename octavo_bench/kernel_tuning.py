"""Finding the configuration of each linear map: all candidates alone, then the best of them in a layer's chain.

Times of a kernel alone mislead, as with programmatic dependent launch it overlaps with its neighbours; so the last word
is that of a chain of layers as a decode step runs them, without attention.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from octavo.ops.triton.config_tables import table_path
from octavo.ops.triton.gemv import GemvConfig
from octavo.ops.triton.graph_timing import microseconds
from octavo.ops.triton.launch import num_multiprocessors, pdl
from octavo.ops.triton.linear_configs import (
    FEW_ROWS,
    LinearConfig,
    Shape,
    bucket_of,
    read_table,
    table_of,
    write_table,
)
from octavo.ops.triton.skinny_gemm import SkinnyConfig
from octavo_bench.linear_case import DTYPE, LinearCase, Operands, Weights

ALONE_BYTES = 400_000_000
"""Weights that take turns when a map is timed alone: several times any cache."""
CHAIN_BYTES = 3_500_000_000
MAX_ERROR = 1e-2
KEPT = 3
"""Best configurations of a map alone that are tried in the chain."""
WORTHWHILE = 0.998
"""Of the chain's time: what is not below is noise."""
Job = tuple[LinearCase, int, LinearConfig]
Timed = list[tuple[float, LinearConfig]]

GEMV = [
    *(GemvConfig(rows, 2048, 4) for rows in (1, 2)),
    GemvConfig(2, 2048, 4, prefetch=2),
    GemvConfig(4, 1024, 4),
    *(GemvConfig(2, 4096, 8, programs=4, prefetch=prefetch) for prefetch in (0, 1)),
    GemvConfig(2, 4096, 8, programs=3),
    GemvConfig(4, 4096, 8, programs=2),
    GemvConfig(4, 4096, 16, programs=2),
    GemvConfig(2, 2048, 4, programs=8),
    GemvConfig(4, 2048, 4, programs=4),
    *(GemvConfig(2, 4096, 8, programs=4, stages=stages) for stages in (3, 4)),
    *(GemvConfig(2, 4096, 4, programs=4, stages=4, prefetch=prefetch) for prefetch in (0, 2)),
    GemvConfig(1, 4096, 4, programs=6, stages=4),
    GemvConfig(4, 2048, 4, programs=4, stages=4),
]
TILES = {
    16: [(16, 64, 128, 4, 3), (16, 64, 64, 4, 6), (16, 64, 64, 4, 4), (16, 64, 128, 4, 4), (16, 128, 64, 4, 5)],
    32: [(32, 64, 128, 4, 3), (32, 64, 64, 4, 5), (32, 64, 64, 4, 3), (32, 128, 64, 4, 4)],
    64: [(64, 64, 64, 4, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 128, 128, 8, 3)],
    128: [(128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 128, 8, 3), (128, 64, 128, 8, 3)],
    256: [(128, 128, 64, 8, 4), (256, 128, 64, 8, 4), (256, 64, 64, 8, 4), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3)],
}
"""Rows, outputs and columns of a tile, warps and stages, by the bucket of rows."""
SHARED_BYTES = 227 * 1024
MOST_SUMS = 128
"""Sums that a thread keeps in registers."""


def candidates(case: LinearCase, rows: int, multiprocessors: int) -> Iterator[LinearConfig]:
    """Configurations worth trying for up to ``rows`` rows, cuBLAS among them."""
    yield None
    if rows == 1:
        yield from {replace(c, block_k=min(c.block_k, triton.next_power_of_2(case.K))): None for c in GEMV}
        return
    for (block_t, block_n, block_k, warps, stages), fuses_norm in itertools.product(TILES[rows], (False, True)):
        weights = block_n * (2 if case.activation else 1)
        shared, sums = stages * (weights + block_t) * block_k * 2, weights * block_t // (32 * warps)
        if (fuses_norm and not (case.has_norm and rows <= FEW_ROWS)) or shared > SHARED_BYTES or sums > MOST_SUMS:
            continue
        at_once = multiprocessors * min(4, SHARED_BYTES // shared, MOST_SUMS // sums)
        tiles = triton.cdiv(case.outputs, block_n) * (rows // block_t)
        for splits in _splits(tiles, case.K // block_k, at_once):
            config = SkinnyConfig(block_n, block_k, warps, stages, splits, copy_engine=True, fuses_norm=fuses_norm)
            config = replace(config, block_t=block_t if rows > FEW_ROWS else 0)
            yield config
            if stages * block_k >= 384:  # the deepest
                yield replace(config, prefetch=2)


def _splits(tiles: int, chunks: int, at_once: int) -> list[int]:
    """Numbers of splits for which whole rounds of programs are nearly full."""
    choices = [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s == 1 or (chunks >= 3 * s and tiles * s <= 2.2 * at_once)]
    fill = {s: tiles * s / (triton.cdiv(tiles * s, at_once) * at_once) for s in choices}
    return sorted(choices, key=lambda s: -fill[s])[:2]


def _with_releases(configs: Iterable[LinearConfig]) -> Iterator[LinearConfig]:
    yield from {_released(config, release): None for config in configs for release in ("early", "late")}


def _released(config: LinearConfig, release: str) -> LinearConfig:
    return None if config is None else replace(config, release=release)


def tune(
    models: Sequence[Sequence[LinearCase]],
    rows: Sequence[int],
    keep: Callable[[], object] = lambda: None,
    deadline: float = float("inf"),
) -> list[dict[str, Any]]:
    """Find the best configurations for these numbers of rows and models, and write them into the device's table.

    A model is its maps: those of a layer in their order, then the head. They are taken in the order in which they are
    given, all models for the first number of rows first. What could not be done within ``deadline`` seconds is left as
    it was. Returns all times on the way. ``keep`` is called whenever the table has grown.
    """
    device = torch.device("cuda")
    path = table_path(torch.cuda.get_device_name(device))
    buckets = dict.fromkeys(bucket for bucket in map(bucket_of, rows) if bucket is not None)
    start, longest = time.perf_counter(), 0.0
    compiler = Compiler()
    turns = list(itertools.product(buckets, models))
    multiprocessors = num_multiprocessors(device)
    compiled = {(n, maps[0].model): compiler.start(_jobs(n, maps, multiprocessors)) for n, maps in turns}
    tuner, chosen = Tuner(device, Weights(CHAIN_BYTES, device)), {}
    for bucket, maps in turns:
        model = maps[0].model
        if time.perf_counter() - start + longest > deadline:
            print(f"octavo: no time is left for {model}, {bucket} rows", file=sys.stderr)
            continue
        for kernel in compiled[bucket, model]:
            kernel.result()
        begun = time.perf_counter()
        configs = chosen[model, bucket] = tuner.tune(maps, bucket)
        longest = max(longest, time.perf_counter() - begun)
        found = {str(Shape(case.N, case.K, bucket)): config for case, config in configs.items()}
        write_table(path, {**read_table(path), **found})
        keep()
        print(f"octavo: {model}, {bucket} rows: done after {time.perf_counter() - start:.0f} s", file=sys.stderr)
    table_of.cache_clear()
    # How much the launch itself is worth: the same without it.
    for (_, bucket), configs in chosen.items():
        if time.perf_counter() - start < deadline:
            for kernel in compiler.start(((case, bucket, c) for case, c in configs.items()), with_pdl=False):
                kernel.result()
            tuner.compare_chains(list(configs.items())[:-1], bucket)
    compiler.close()
    return tuner.notes


def _jobs(bucket: int, maps: Sequence[LinearCase], multiprocessors: int) -> Iterator[Job]:
    for case in maps:
        for config in candidates(case, bucket, multiprocessors):
            yield case, bucket, config


class Tuner:
    """Finds configurations on this device; ``notes`` keeps all that was measured on the way."""

    def __init__(self, device: torch.device, weights: Weights) -> None:
        self.device = device
        self.weights = weights
        self.multiprocessors = num_multiprocessors(device)
        self.notes: list[dict[str, Any]] = []

    def tune(self, maps: Sequence[LinearCase], rows: int) -> dict[LinearCase, LinearConfig]:
        """The best configurations of a layer's maps and the head, which is the last, for one bucket of rows."""
        alone = [self.time_alone(case, rows) for case in maps]
        chosen = [*self.tune_chain(maps[:-1], alone[:-1], rows), alone[-1][0][1]]
        return dict(zip(maps, chosen, strict=True))

    def time_alone(self, case: LinearCase, rows: int) -> Timed:
        """Right configurations with their times, the fastest first."""
        weights = [weight for (weight,) in self.weights.layers([case], ALONE_BYTES)]
        given = case.operands(rows, self.device)
        timed: Timed = []
        for config in candidates(case, rows, self.multiprocessors):
            try:
                with pdl():
                    error = case.error(rows, weights[0], config)
            except OutOfResources:  # not for this device
                continue
            calls = [functools.partial(case.run, given, weight, config) for weight in weights]
            taken = microseconds(calls, with_pdl=True)
            note = {"model": case.model, "map": case.name, "rows": rows, "config": str(config)}
            self.notes.append({**note, "microseconds": round(taken, 2), "error": error})
            if error < MAX_ERROR:
                timed.append((taken, config))
        return sorted(timed, key=lambda item: item[0])

    def tune_chain(self, cases: Sequence[LinearCase], alone: Sequence[Timed], rows: int) -> list[LinearConfig]:
        """From the best alone, change one map at a time if the chain gets faster."""
        chosen = [timed[0][1] for timed in alone]
        best = self.time_chain(cases, rows, chosen)
        for i, timed in enumerate(alone):
            for config in _with_releases(config for _, config in timed[:KEPT]):
                changed = [*chosen[:i], config, *chosen[i + 1 :]]
                taken = self.time_chain(cases, rows, changed)
                if taken < WORTHWHILE * best:
                    chosen, best = changed, taken
        return chosen

    def time_chain(
        self, cases: Sequence[LinearCase], rows: int, configs: Sequence[LinearConfig], with_pdl: bool = True
    ) -> float:
        """Microseconds of a layer's maps one after the other, through several layers."""
        given = [case.operands(rows, self.device) for case in cases]
        x, attended = given[0].x_TK, given[1].x_TK

        def layer(weights: Sequence[Tensor]) -> None:
            calls = zip(cases, weights, configs, strict=True)
            qkv, o, gate_up, down = (functools.partial(c.run, weight_NK=w, config=config) for c, w, config in calls)
            qkv(Operands(x, given[0].norm_K, None))
            o(Operands(attended, None, x))
            down(Operands(gate_up(Operands(x, given[2].norm_K, None)), None, x))

        layers = self.weights.layers(cases, CHAIN_BYTES)
        taken = microseconds([functools.partial(layer, weights) for weights in layers], with_pdl)
        note = {"model": cases[0].model, "rows": rows, "chain": [str(config) for config in configs], "pdl": with_pdl}
        self.notes.append({**note, "microseconds": round(taken, 2)})
        return taken

    def compare_chains(self, chosen: Sequence[tuple[LinearCase, LinearConfig]], rows: int) -> None:
        """Time a layer without programmatic dependent launch, with all releases alike, and by cuBLAS."""
        cases, configs = zip(*chosen, strict=True)
        self.time_chain(cases, rows, configs, with_pdl=False)
        self.time_chain(cases, rows, [None] * len(cases), with_pdl=False)
        for release in ("early", "late"):
            self.time_chain(cases, rows, [_released(config, release) for config in configs])


class Compiler:
    """Compiles the kernels of configurations in processes of their own, into Triton's cache on disk."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pool = ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), context, _launch_nothing)

        self._started: dict[object, Future[None]] = {}

    def start(self, jobs: Iterable[Job], with_pdl: bool = True) -> list[Future[None]]:
        """Start to compile what these launch, each kernel once; all that there is to wait for."""
        found = {}
        for job in jobs:
            key = (*_kernel_key(*job), with_pdl)
            if key not in self._started:
                self._started[key] = self._pool.submit(_compile, *job, with_pdl)
            found[key] = self._started[key]
        return list(found.values())

    def close(self) -> None:
        """Leave what has not begun."""
        self._pool.shutdown(cancel_futures=True)


def _kernel_key(case: LinearCase, rows: int, config: LinearConfig) -> tuple[object, ...]:
    """What differs between kernels: a GEMV is compiled for its columns and for whether its rows come out even."""
    parts = (rows, _released(config, "early"), case.has_norm, case.has_residual, case.activation)
    return (*parts, case.K, case.outputs) if isinstance(config, GemvConfig) else parts


def _launch_nothing() -> None:
    """Make launches of this process stop after the compilation."""
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only


def _compile(case: LinearCase, rows: int, config: LinearConfig, with_pdl: bool) -> None:
    weight = torch.empty(case.N, case.K, dtype=DTYPE, device="cuda")
    with pdl() if with_pdl else contextlib.nullcontext():
        case.run(case.operands(rows, weight.device), weight, config)
