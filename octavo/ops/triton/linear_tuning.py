"""Finds the fastest configurations of linear maps on this device by measuring a few that should be fast.

Every candidate is checked against cuBLAS, and timed in a CUDA graph in which weights take turns, so that they come from
memory as in a decode step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.ops.triton.config_tables import fields_of
from octavo.ops.triton.graph_timing import microseconds
from octavo.ops.triton.launch import compiling, pdl
from octavo.ops.triton.linear import run_linear
from octavo.ops.triton.linear_configs import KINDS, LinearConfig, config_for, key_of, table_of
from octavo.ops.triton.linear_cost import LIBRARY_LEAD, Product, gpu_of, ranked
from octavo.ops.triton.linear_uses import LinearUse
from octavo.ops.triton.skinny_gemm import SkinnyConfig

EPS = 1e-6
MAX_ERROR = 1e-2
"""Norm of a difference over that of the result: 16 bits give some 3e-3."""
CANDIDATES = 6
SPLITS_OF_A_TILE = 2
"""Candidates that differ in their splits alone."""
TURN_BYTES = 200_000_000
"""Weights that take turns: several times any cache."""
MOST_TURNS = 32
WORTHWHILE = 0.99
"""Of the time of the present configuration: what is not below is noise."""

logger = logging.getLogger(__name__)


class Timed(NamedTuple):
    """A configuration that gives the right result, and its time."""

    microseconds: float
    config: LinearConfig


class LinearTuner:
    """Measures configurations for the linear maps of a model, on its own weights."""

    def __init__(self, uses: Mapping[LinearUse, Sequence[Tensor]], device: torch.device) -> None:
        """Of several uses of one shape, the first is measured. Without 16 bits there is nothing to choose."""
        self._uses: dict[Product, LinearUse] = {}
        for use in uses:
            if use.dtype != torch.float32:
                self._uses.setdefault(use.product(0), use)
        self._weights = uses
        self._device = device
        self._prepared: dict[str, tuple[LinearUse, int]] = {}

    def prepare(self, rows: int, again: bool, num_threads: int | None = None) -> list[str]:
        """Compile the candidates for a bucket of rows, and return the keys of the products to measure.

        These are those without a measurement, or with ``again`` all.
        """
        found = {key_of(use.product(rows)): (use, rows) for use in self._uses.values()}
        if not again:
            found = {key: job for key, job in found.items() if key not in table_of(self._device)}
        try:
            self._compile(found.values(), num_threads)
        except Exception as error:  # each is compiled again when it is measured, and left out if that fails
            logger.info("a candidate cannot be compiled: %s", error)
        self._prepared |= found
        return list(found)

    def _compile(self, jobs: Iterable[tuple[LinearUse, int]], num_threads: int | None) -> None:
        with torch.inference_mode(), pdl(), compiling(num_threads):
            for use, rows in jobs:
                given = operands(use, rows, self._device)
                for config in candidates(use, rows, self._device):
                    given.run(self._weights[use][0], config)

    def measure(self, key: str) -> dict[str, Any] | None:
        """The table's entry of a prepared product: its fastest configuration.

        ``None`` for a product of another rank alone, as where ranks have shares of different sizes.
        """
        if key not in self._prepared:
            return None
        use, rows = self._prepared[key]
        present = present_config(use, rows, self._device)
        timed = measure(use, rows, candidates(use, rows, self._device), self._weights[use], self._device)
        return fields_of(fastest(timed, present), KINDS)


def fastest(timed: Sequence[Timed], present: LinearConfig) -> LinearConfig:
    """The fastest configuration, or the present one if that is as good; cuBLAS must lead, see ``LIBRARY_LEAD``."""
    taken = {item.config: item.microseconds / (LIBRARY_LEAD if item.config is None else 1.0) for item in timed}
    least = min(taken, default=present, key=lambda config: taken[config])
    return least if taken and taken[least] < WORTHWHILE * taken.get(present, float("inf")) else present


def present_config(use: LinearUse, rows: int, device: torch.device) -> LinearConfig:
    """What is used without a measurement."""
    return config_for(rows, use.N, use.K, use.activation is not None, device)


def candidates(use: LinearUse, rows: int, device: torch.device, count: int = CANDIDATES) -> list[LinearConfig]:
    """The present configuration, the library's, and those of the least predicted cost, of different tiles."""
    found: dict[LinearConfig, None] = {present_config(use, rows, device): None, None: None}
    tiles: dict[object, int] = {}
    for config in ranked(use.product(rows), gpu_of(device)):
        tile: object = config
        if isinstance(config, SkinnyConfig):
            tile = config.block_n, config.block_k, config.warps, config.stages, config.block_t
        tiles[tile] = tiles.get(tile, 0) + 1
        if tiles[tile] <= SPLITS_OF_A_TILE and len(found) < count + 2:
            found[config] = None
    return list(found)


class Operands(NamedTuple):
    """Inputs of a linear map other than its weight: random numbers."""

    x_TK: Tensor
    bias_N: Tensor | None
    norm_K: Tensor | None
    residual_TN: Tensor | None
    use: LinearUse

    def copied(self) -> Operands:
        """The same with a copy of the residual, which a run overwrites."""
        return self if self.residual_TN is None else self._replace(residual_TN=self.residual_TN.clone())

    def run(self, weight_NK: Tensor, config: LinearConfig) -> Tensor:
        """The map in this configuration."""
        given = self.bias_N, self.norm_K, EPS, self.residual_TN
        return run_linear(self.x_TK, weight_NK, *given, self.use.activation, config)


def operands(use: LinearUse, rows: int, device: torch.device) -> Operands:
    """Random operands for this many rows."""
    random = functools.partial(torch.randn, device=device, dtype=use.dtype)
    outputs = use.product(rows).outputs
    return Operands(
        random(rows, use.K),
        random(use.N) if use.has_bias else None,
        random(use.K).abs() + 0.5 if use.has_norm else None,
        random(rows, outputs) if use.has_residual else None,
        use,
    )


def measure(
    use: LinearUse,
    rows: int,
    configs: Sequence[LinearConfig],
    weights: Sequence[Tensor],
    device: torch.device,
) -> list[Timed]:
    """Times of those configurations that this device can run and that give the right result."""
    turns = max(2, min(MOST_TURNS, triton.cdiv(TURN_BYTES, weights[0].nbytes)))
    in_turn = [weights[i % len(weights)] for i in range(turns)]
    found = []
    try:
        given = operands(use, rows, device)
        expected = _result(given, weights[0], None)
        for config in configs:
            taken = _time(given, in_turn, config, expected)
            if taken is not None:
                found.append(Timed(taken, config))
    except torch.OutOfMemoryError:
        logger.info("no memory to measure %s", key_of(use.product(rows)))
    return found


def _time(given: Operands, weights: Sequence[Tensor], config: LinearConfig, expected: Tensor) -> float | None:
    """Microseconds, or ``None`` if the configuration is wrong here."""
    try:
        difference = _result(given, weights[0], config) - expected
        error = float(difference.norm() / expected.norm())
        run = given.copied().run
        calls: list[Callable[[], object]] = [functools.partial(run, weight, config) for weight in weights]
        taken = microseconds(calls, with_pdl=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # of Triton, its compiler or the driver; a candidate must not stop the engine
        logger.info("%s cannot be used here: %s", config, failure)
        return None
    key = key_of(given.use.product(len(given.x_TK)))
    if not error < MAX_ERROR:
        logger.warning("%s: the result of %s is wrong by %.1e", key, config, error)
        return None
    logger.debug("%s: %.2f us, error %.1e: %s", key, taken, error, config)
    return taken


def _result(given: Operands, weight_NK: Tensor, config: LinearConfig) -> Tensor:
    """The result in float32."""
    outputs = given.use.product(len(given.x_TK)).outputs
    # What the allocator gives out next: a result that is not written shows.
    torch.full((len(given.x_TK), outputs), float("nan"), device=weight_NK.device, dtype=weight_NK.dtype)
    with pdl():
        return given.copied().run(weight_NK, config).float()
