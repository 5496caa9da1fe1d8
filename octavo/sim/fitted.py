"""A cost model learned from steps that were timed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.sim.cost_model import StepWork

Array = npt.NDArray[np.float64]

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Where the time may bend as tokens or rows of a step grow: kernels change their form with the number of rows."""
RIDGE = 1e-3
NUM_QUANTILES = 201
LEAST_STEPS = 50


@dataclass(frozen=True)
class Fitted:
    """``seconds`` is linear in the context and the pairs, and piecewise linear in tokens and in rows.

    What steps of equal work differ by is drawn from what was seen: ``spread`` holds quantiles of measured over
    fitted time. A simulation without it would have no tail.
    """

    coefficients: tuple[float, ...]
    least: float
    """No step was faster."""
    spread: tuple[float, ...]
    rng: random.Random
    num_steps: int
    error: float
    """Median of the relative error over the steps that were fitted."""

    def expected(self, work: StepWork) -> float:
        """Seconds, without chance."""
        total = sum(map(float.__mul__, self.coefficients, features(work)))
        return max(self.least, total)

    def seconds(self, work: StepWork) -> float:
        return self.expected(work) * self.rng.choice(self.spread)


def features(work: StepWork) -> list[float]:
    """What time is linear in."""
    hinges = [float(max(0, count - knot)) for count in (work.tokens, work.rows) for knot in KNOTS]
    return [1.0, float(work.rows > 0), float(work.context), float(work.pairs), *hinges]


def fit(works: Sequence[StepWork], seconds: Sequence[float], seed: int = 0) -> Fitted:
    """Least squares of relative errors, with a small ridge, for counts that were seldom seen.

    Raise ``ConfigError`` when there are too few steps to tell.
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
    spread = np.quantile(ratios, np.linspace(0, 1, NUM_QUANTILES))
    return Fitted(
        tuple(map(float, coefficients)),
        least,
        tuple(map(float, spread)),
        random.Random(seed),
        len(works),
        float(np.median(np.abs(ratios - 1))),
    )


def _solve(x_SF: Array, y_S: Array, weights_S: Array) -> Array:
    scale_F = np.abs(x_SF).max(axis=0) + 1e-12
    a = x_SF / scale_F * weights_S[:, None]
    ridge = RIDGE * np.sqrt(len(y_S)) * np.eye(a.shape[1])
    found, *_ = np.linalg.lstsq(
        np.vstack([a / y_S[:, None], ridge]), np.r_[weights_S, np.zeros(a.shape[1])], rcond=None
    )
    result: Array = found / scale_F
    return result


def _robust_weights(x_SF: Array, y_S: Array) -> Array:
    """Less weight for steps far from a first fit (Huber): a pause of the machine is not the model's doing."""
    weights_S = np.ones(len(y_S))
    for _ in range(3):
        errors = np.abs(x_SF @ _solve(x_SF, y_S, weights_S) / y_S - 1)
        bound = 2 * np.median(errors) + 1e-9
        weights_S = np.sqrt(np.minimum(1.0, bound / np.maximum(errors, 1e-12)))
    return weights_S


def write_log(path: Path, works: Sequence[StepWork], seconds: Sequence[float]) -> None:
    """One JSON line for each step: what it computed and how long it took."""
    lines = [
        json.dumps({**work._asdict(), "seconds": round(taken, 9)}) for work, taken in zip(works, seconds, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")


def read_log(path: Path) -> tuple[list[StepWork], list[float]]:
    """The inverse; raise ``ConfigError`` for a file that is not such a log."""
    works, seconds = [], []
    try:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            works.append(StepWork(*[int(entry[name]) for name in StepWork._fields]))
            seconds.append(float(entry["seconds"]))
    except OSError as error:
        raise ConfigError(f"cost log: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        fields = ", ".join((*StepWork._fields, "seconds"))
        raise ConfigError(f"cost log: line {len(works) + 1} of {path} is not an object with {fields}") from None
    return works, seconds
