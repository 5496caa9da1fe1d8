"""When kernels are measured, and for how long: at startup, before graphs are captured, for a bounded time.

Measurements are replies of the executor. What they lead to is sent back to it as one message, so that executors that
get the same messages use the same kernels from the same place of the stream on, whatever their own clocks say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.config import FULL, ModelSettings
from octavo.steps.messages import MeasureKernels, Message, PrepareTuning, Reply, UseKernels

logger = logging.getLogger(__name__)

TUNED_ROWS = (16, 1, 64, 8, 32, 128, 256)
"""Buckets of rows, those that gain most first; 8 is one of packed weights alone."""
Report = Callable[[float, str], None]
"""Is told the share of the work that is done, and the product that was measured last."""


@dataclass(frozen=True)
class TuningPlan:
    """How much is measured."""

    seconds: float = float("inf")
    """No bucket of rows, and no product of one, is begun that would take longer, if it takes as long as the longest
    before it."""
    again: bool = False
    """Also products that were measured before."""
    report: Report = lambda share, key: None


NO_TUNING = TuningPlan(0.0)


def plan_of(settings: ModelSettings) -> TuningPlan:
    """The plan of a start: of one that warms up in full, without a limit of time if anything is to be measured. The
    kernels of batch invariance are fixed: no measurement decides on their order of sums."""
    if settings.batch_invariant or not settings.kernel_tuning_seconds:
        return NO_TUNING
    return TuningPlan() if settings.warmup == FULL else TuningPlan(settings.kernel_tuning_seconds)


def tune_kernels(send: Callable[[Message], Reply[Any]], plan: TuningPlan) -> int:
    """Measure kernels for the products of the executor's model and have it use the fastest; returns how many products.

    What the time does not suffice for is left to the next start.
    """
    started, longest, preparing = time.monotonic(), 0.0, 0.0
    entries: dict[str, dict[str, Any]] = {}
    is_over = plan.seconds <= 0
    for i, num_rows in enumerate(TUNED_ROWS):
        begun = time.monotonic()
        is_over = is_over or begun + longest - started > plan.seconds  # perhaps with products left of the last bucket
        if is_over:
            break
        keys = send(PrepareTuning(num_rows, plan.again, plan.seconds - (begun - started))).wait()
        preparing += time.monotonic() - begun
        if keys:
            logger.info("measuring kernels for %d matrix products of up to %d rows", len(keys), num_rows)
        for j, key in enumerate(keys):
            entries[key] = send(MeasureKernels(key)).wait()
            plan.report((i + (j + 1) / len(keys)) / len(TUNED_ROWS), key)
        longest = max(longest, time.monotonic() - begun)
        is_over = time.monotonic() - started > plan.seconds
    if entries:
        send(UseKernels(entries)).wait()
        rest = "; the next start measures the others" if is_over else ""
        taken = time.monotonic() - started
        logger.info(
            "kernels of %d matrix products measured in %.1f s, of it %.1f s compiling%s",
            *(len(entries), taken, preparing, rest),
        )
    return len(entries)
