"""A cost model fitted to timed steps."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.engine.timing.step_model import StepWork
from octavo.errors import ConfigError
from octavo_fleet.sim.costs.cost_model import CostModel

Array = npt.NDArray[np.float64]

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Breakpoints in tokens and rows of the piecewise linear fit: kernel variants change with the number of rows."""
RIDGE = 1e-3
HEAD_RIDGE = 0.1
"""Ridge of the time saved by steps that sample nothing: zero unless such steps were logged."""
NUM_GROUPS = 8
"""Groups of steps by duration: short steps vary more, relatively, than long ones."""
MAX_RATIOS = 4096
LEAST_STEPS = 50


@dataclass(frozen=True)
class Fitted(CostModel):
    """``seconds`` is linear in the context and the pairs, and piecewise linear in tokens and in rows.

    Each result is multiplied by a ratio of measured to fitted time, drawn from the logged steps of similar duration.
    Without this a simulation would have no tail latency.
    """

    coefficients: tuple[float, ...]
    least: float
    """Lower bound: the fastest logged step."""
    bounds: tuple[float, ...]
    """Boundaries between the groups of steps, in fitted seconds."""
    ratios: tuple[tuple[float, ...], ...]
    """Ratios of measured to fitted time, for each group."""
    rng: random.Random
    num_steps: int
    error: float
    """Median relative error over the fitted steps."""

    def expected(self, work: StepWork) -> float:
        """Fitted seconds, without the random ratio."""
        total = sum(map(float.__mul__, self.coefficients, features(work)))
        return max(self.least, total)

    def seconds(self, work: StepWork) -> float:
        expected = self.expected(work)
        return expected * self.rng.choice(self.ratios[bisect_right(self.bounds, expected)])

    def of_replica(self, number: int) -> Fitted:
        rng = copy(self.rng)
        for _ in range(number):
            rng = random.Random(rng.getrandbits(64))
        return replace(self, rng=rng)

    def as_of(self, works: Sequence[StepWork], seconds: Sequence[float]) -> Fitted:
        """The same coefficients with the ratios of these steps: the machine's speed and variance at that time."""
        expected = np.array([self.expected(work) for work in works])
        return replace(self, **_grouped(expected, np.array(seconds) / expected), rng=random.Random(len(works)))


def _grouped(expected_S: Array, ratios_S: Array) -> dict[str, Any]:
    """``bounds`` and ``ratios`` of groups of about equal size; large groups are subsampled evenly."""
    cuts = np.quantile(expected_S, np.linspace(0, 1, NUM_GROUPS + 1)[1:-1], method="lower")
    bounds = np.unique(cuts[cuts > expected_S.min()]) * (1 - 1e-9)  # later sums may round differently
    group_S = np.searchsorted(bounds, expected_S, side="right")
    used = np.unique(group_S)
    ratios = []
    for number in used:
        own = np.sort(ratios_S[group_S == number])
        stride = -(-len(own) // MAX_RATIOS)
        ratios.append(tuple(map(float, own[stride // 2 :: stride])))
    return {"bounds": tuple(map(float, bounds[used[1:] - 1])), "ratios": tuple(ratios)}


def features(work: StepWork) -> list[float]:
    """Features in which time is linear. Steps with prefill run other kernels than pure decode steps."""
    hinges = [float(max(0, count - knot)) for count in (work.tokens, work.rows) for knot in KNOTS]
    kinds = float(work.rows > 0), float(work.tokens > work.rows), float(work.idle), float(work.rested)
    return [1.0, *kinds, float(work.context), float(work.pairs), *hinges]


def fit(works: Sequence[StepWork], seconds: Sequence[float], seed: int = 0) -> Fitted:
    """Least squares of relative errors, with a small ridge for rare counts.

    Raises ``ConfigError`` for too few steps.
    """
    if len(works) < LEAST_STEPS:
        raise ConfigError(f"cost log: {len(works)} steps are too few to learn from; at least {LEAST_STEPS} are needed")
    x_SF: Array = np.array([features(work) for work in works])
    y_S: Array = np.array(seconds)
    weights_S = _robust_weights(x_SF, y_S)
    coefficients = _solve(x_SF, y_S, weights_S)
    least = float(np.quantile(y_S, 0.001))
    fitted_S = np.maximum(least, x_SF @ coefficients)
    ratios = y_S / fitted_S
    return Fitted(
        tuple(map(float, coefficients)),
        least,
        **_grouped(fitted_S, ratios),
        rng=random.Random(seed),
        num_steps=len(works),
        error=float(np.median(np.abs(ratios - 1))),
    )


def _solve(x_SF: Array, y_S: Array, weights_S: Array) -> Array:
    scale_F = np.abs(x_SF).max(axis=0) + 1e-12
    a = x_SF / scale_F * weights_S[:, None]
    ridge = np.diag([RIDGE, HEAD_RIDGE, *[RIDGE] * (a.shape[1] - 2)]) * np.sqrt(len(y_S))
    found, *_ = np.linalg.lstsq(
        np.vstack([a / y_S[:, None], ridge]), np.r_[weights_S, np.zeros(a.shape[1])], rcond=None
    )
    result: Array = found / scale_F
    return result


def _robust_weights(x_SF: Array, y_S: Array) -> Array:
    """Huber weights, smaller for steps far from a first fit: the machine's pauses are outliers."""
    weights_S = np.ones(len(y_S))
    for _ in range(3):
        errors = np.abs(x_SF @ _solve(x_SF, y_S, weights_S) / y_S - 1)
        bound = 2 * np.median(errors) + 1e-9
        weights_S = np.sqrt(np.minimum(1.0, bound / np.maximum(errors, 1e-12)))
    return weights_S


def read_log(path: Path) -> tuple[list[StepWork], list[float]]:
    """Read a log written by ``step_times.logged``; raise ``ConfigError`` for any other file."""
    works, seconds = [], []
    try:
        for line in path.read_text().splitlines():
            entry = {**StepWork._field_defaults, **json.loads(line)}
            works.append(StepWork(*[int(entry[name]) for name in StepWork._fields]))
            seconds.append(float(entry["seconds"]))
    except OSError as error:
        raise ConfigError(f"cost log: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        required = [name for name in StepWork._fields if name not in StepWork._field_defaults]
        fields = ", ".join((*required, "seconds"))
        raise ConfigError(f"cost log: line {len(works) + 1} of {path} is not an object with {fields}") from None
    return works, seconds
