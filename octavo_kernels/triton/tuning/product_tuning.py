"""Finds the fastest configurations of matrix products on this device by measuring a few that should be fast.

Every candidate is checked against a result that is right, and timed in a CUDA graph in which weights take turns, so
that they come from memory as in a decode step.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.errors import CANCELLATIONS
from octavo.ops.linear.grouped_linear import LARGEST_COPY, Number, PackedGroups
from octavo.ops.linear.linear import Fused
from octavo.system.cpus import num_cpus
from octavo.system.kernel_compiler import compilers
from octavo_kernels.hopper.pipelined_configs import pipelined_configs
from octavo_kernels.hopper.streamed_configs import streamed_configs
from octavo_kernels.triton.config_tables import ConfigTable
from octavo_kernels.triton.graph_timing import microseconds
from octavo_kernels.triton.grouped import grouped_configs
from octavo_kernels.triton.grouped.grouped_configs import ROW_BUCKETS, TABLE, GroupedConfig, config_for, key_of
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_linear import run_grouped
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import compiling, pdl
from octavo_kernels.triton.linear import linear_configs
from octavo_kernels.triton.tuning.grouped_cost import ranked
from octavo_kernels.triton.tuning.linear_cost import LIBRARY_LEAD, gpu_of
from octavo_kernels.triton.tuning.linear_uses import LinearUse
from octavo_kernels.triton.tuning.product_calls import ProductCall
from octavo_kernels.triton.tuning.tuning_target import EPS, Operands, ProductUse

# ---- Products with packed weights, for the measuring of kernels.

DENSE_ROWS = 128
"""From so many rows on, a dense copy of the weight may be worth its bytes."""


@dataclass(frozen=True, kw_only=True)
class GroupedUse(ProductUse):
    """How ``grouped_linear`` is called."""

    table = TABLE
    row_buckets = ROW_BUCKETS
    num_candidates = 7

    number: Number
    groups: int
    has_zeros: bool = False
    has_minima: bool = False
    has_order: bool = False
    scale_bytes: int = 2

    @classmethod
    def of(cls, call: ProductCall, packed: PackedGroups) -> GroupedUse:
        """How this call uses this weight."""
        N, K = packed.shape
        return cls(
            N,
            K,
            *call[1:],
            number=packed.number,
            groups=len(packed.scales_GN),
            has_zeros=packed.zeros_GN is not None,
            has_minima=packed.minima_GN is not None,
            has_order=packed.order_K is not None,
            scale_bytes=packed.scales_GN.element_size(),
        )

    @property
    def product(self) -> GroupedProduct:
        """The product for any number of rows."""
        sizes = self.number, self.groups, self.N, self.K, self.is_gated
        return GroupedProduct(*sizes, self.dtype, self.has_zeros, self.has_minima, self.scale_bytes)

    @property
    def may_be_dense(self) -> bool:
        """Whether there may be a dense copy of the weight."""
        return self.N * self.K <= LARGEST_COPY

    def key(self, rows: int) -> str:
        return key_of(self.product, rows)

    def present(self, rows: int, device: torch.device) -> GroupedConfig:
        return config_for(rows, self.product, device)

    def candidates(self, rows: int, device: torch.device, count: int) -> list[GroupedConfig]:
        """The present configuration, for many rows a dense copy, what overlaps copies and products, and those of the
        least predicted cost."""
        found: dict[GroupedConfig, None] = {self.present(rows, device): None}
        if rows >= DENSE_ROWS and self.may_be_dense:
            found[None] = None
        most = len(found) + count
        overlapping = streamed_configs(self.product, device) if rows == 1 else []
        found |= dict.fromkeys(overlapping or pipelined_configs(self.product, rows, device))
        for config in ranked(self.product, rows, gpu_of(device)):
            if len(found) < most:
                found[config] = None
        return list(found)

    @property
    def reference(self) -> GroupedConfig:
        """A dense copy; where that is too large, the plainest tiles."""
        return None if self.may_be_dense else GroupedGemmConfig(64, 16, warps=4, stages=2, release="late")

    def run(self, given: Operands, weight: PackedGroups, config: GroupedConfig) -> Tensor:
        x_TK, bias_N, norm_K, residual_TN = given
        return run_grouped(x_TK, weight, Fused(bias_N, norm_K, EPS, residual_TN, self.activation), config)


TABLES: dict[str, ConfigTable] = {table.section: table for table in (linear_configs.TABLE, grouped_configs.TABLE)}
MAX_ERROR = 1e-2
"""Norm of a difference over that of the result: 16 bits give some 3e-3."""
TURN_BYTES = 200_000_000
"""Weights that take turns: several times any cache."""
MOST_TURNS = 32
WORTHWHILE = 0.99
"""Of the time of the present configuration: what is not below is noise."""

Weight = Tensor | PackedGroups
logger = logging.getLogger(__name__)


class Timed(NamedTuple):
    """A configuration that gives the right result, and its time."""

    microseconds: float
    config: Any


def uses_of(calls: Iterable[ProductCall]) -> dict[ProductUse, list[Weight]]:
    """How a model calls its products, in their order, and the weights that are used so."""
    found: dict[ProductUse, list[Weight]] = {}
    for call in calls:
        weight = call.weight
        use = GroupedUse.of(call, weight) if isinstance(weight, PackedGroups) else LinearUse.of(call, weight)
        found.setdefault(use, []).append(weight)
    return found


def name_of(use: ProductUse, rows: int) -> str:
    """The name of a product among those of all tables: the section, and the key in it."""
    return f"{use.table.section} {use.key(rows)}"


def use_entries(entries: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """From now on use these entries, by the names of their products, and keep them for the next start."""
    for section, table in TABLES.items():
        start = f"{section} "
        own = {name.removeprefix(start): entry for name, entry in entries.items() if name.startswith(start)}
        table.use(own, device)


class ProductTuner:
    """Measures configurations for the matrix products of a model, on its own weights."""

    def __init__(self, uses: Mapping[ProductUse, Sequence[Weight]], device: torch.device) -> None:
        """Of several uses with one entry, the first is measured. Without 16 bits there is nothing to choose."""
        self._uses: dict[str, ProductUse] = {}
        for use in uses:
            if use.dtype != torch.float32:
                self._uses.setdefault(name_of(use, 0), use)
        self._weights = uses
        self._device = device
        self._prepared: dict[str, tuple[ProductUse, int]] = {}

    def prepare(self, rows: int, again: bool, seconds: float = math.inf, num_threads: int | None = None) -> list[str]:
        """Compile the candidates for a bucket of rows, and return the names of the products to measure.

        These are those without a measurement, or with ``again`` all; of them as many as are compiled in about
        ``seconds``, at least one.
        """
        found = {name_of(use, rows): (use, rows) for use in self._uses.values() if rows in use.row_buckets}
        if not again:
            found = {name: job for name, job in found.items() if job[0].key(rows) not in job[0].table.of(self._device)}
        started, longest, compiled = time.monotonic(), 0.0, set[str]()
        for names in self._groups(found, seconds):
            begun = time.monotonic()
            if compiled and begun + longest - started > seconds:
                break
            try:
                self._compile([found[name] for name in names], num_threads)
            except CANCELLATIONS:
                raise
            except BaseException as error:  # each is compiled again when it is measured, and left out if that fails
                logger.info("a candidate cannot be compiled: %s", error)
            compiled.update(names)
            longest = max(longest, time.monotonic() - begun)
        found = {name: job for name, job in found.items() if name in compiled}
        self._prepared |= found
        return list(found)

    def _groups(self, jobs: Mapping[str, tuple[ProductUse, int]], seconds: float) -> list[list[str]]:
        """Products that are compiled at the same time, those with the largest weights first: as few as give each
        process that compiles a kernel, or without a bound all."""
        names = sorted(jobs, key=lambda name: -sum(map(_bytes_of, self._weights[jobs[name][0]])))
        processes = compilers()
        kernels = max((use.num_candidates for use, _ in jobs.values()), default=1)
        size = max(1, (processes.count if processes else num_cpus()) // kernels)
        size = max(1, len(names)) if seconds == math.inf else size
        return [names[start : start + size] for start in range(0, len(names), size)]

    def _compile(self, jobs: Iterable[tuple[ProductUse, int]], num_threads: int | None) -> None:
        with torch.inference_mode(), pdl(), compiling(num_threads):
            for use, rows in jobs:
                given = use.operands(rows, self._device)
                for config in (use.reference, *use.candidates(rows, self._device, use.num_candidates)):
                    use.run(given, self._weights[use][0], config)

    def measure(self, name: str) -> dict[str, Any] | None:
        """The table's entry of a prepared product: its fastest configuration.

        ``None`` for a product of another rank alone, as where ranks have shares of different sizes.
        """
        if name not in self._prepared:
            return None
        use, rows = self._prepared[name]
        configs = use.candidates(rows, self._device, use.num_candidates)
        timed = measure(use, rows, configs, self._weights[use], self._device)
        return use.table.fields_of(fastest(timed, use.present(rows, self._device)))


def fastest(timed: Sequence[Timed], present: Any) -> Any:
    """The fastest configuration, or the present one if that is as good; cuBLAS must lead, see ``LIBRARY_LEAD``."""
    taken = {item.config: item.microseconds / (LIBRARY_LEAD if item.config is None else 1.0) for item in timed}
    least = min(taken, default=present, key=lambda config: taken[config])
    return least if taken and taken[least] < WORTHWHILE * taken.get(present, float("inf")) else present


def measure(
    use: ProductUse, rows: int, configs: Sequence[Any], weights: Sequence[Weight], device: torch.device
) -> list[Timed]:
    """Times of those configurations that this device can run and that give the right result."""
    turns = max(2, min(MOST_TURNS, triton.cdiv(TURN_BYTES, _bytes_of(weights[0]))))
    in_turn = [weights[i % len(weights)] for i in range(turns)]
    found = []
    try:
        given = use.operands(rows, device)
        expected = _result(use, given, weights[0], use.reference)
        for config in configs:
            taken = _time(use, given, in_turn, config, expected)
            if taken is not None:
                found.append(Timed(taken, config))
    except CANCELLATIONS:
        raise
    except BaseException as failure:  # of the reference, or for want of memory
        logger.info("%s cannot be measured: %s", name_of(use, rows), failure)
    return found


def _bytes_of(weight: Weight) -> int:
    return weight.num_bytes if isinstance(weight, PackedGroups) else weight.nbytes


def _time(use: ProductUse, given: Operands, weights: Sequence[Weight], config: Any, expected: Tensor) -> float | None:
    """Microseconds, or ``None`` if the configuration is wrong here."""
    try:
        difference = _result(use, given, weights[0], config) - expected
        error = float(difference.norm() / expected.norm())
        own = given.copied()
        calls: list[Callable[[], object]] = [functools.partial(use.run, own, weight, config) for weight in weights]
        taken = microseconds(calls, with_pdl=True)
    except torch.OutOfMemoryError:
        raise
    except CANCELLATIONS:
        raise
    except BaseException as failure:  # of Triton, its compiler or the driver; a candidate must not stop the engine
        logger.info("%s cannot be used here: %s", config, failure)
        return None
    name = name_of(use, len(given.x_TK))
    if not error < MAX_ERROR:
        logger.warning("%s: the result of %s is wrong by %.1e", name, config, error)
        return None
    logger.debug("%s: %.2f us, error %.1e: %s", name, taken, error, config)
    return taken


def _result(use: ProductUse, given: Operands, weight: Weight, config: Any) -> Tensor:
    """The result in float32."""
    outputs = use.N // 2 if use.is_gated else use.N
    # What the allocator gives out next: a result that is not written shows.
    torch.full((len(given.x_TK), outputs), float("nan"), device=given.x_TK.device, dtype=given.x_TK.dtype)
    with pdl():
        return use.run(given.copied(), weight, config).float()
