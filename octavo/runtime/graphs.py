"""CUDA graphs of whole steps, one for each shape of a step.

A graph replays what ran while it was captured, with the same tensors: whatever differs from step to step must be read
on the device. Graphs share one memory pool, so only one may run at a time and its outputs hold until the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from octavo.collector import without_collections
from octavo.runtime.step_inputs import StepShape

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240)
"""Sequences of a decode step that has a graph; above them, every 32."""
MIXED_ROWS = (
    *(16, 32, 48, 64, 96, 128, 144, 160, 192, 224, 256, 288, 320, 384, 448, 512),
    *range(640, 2049, 128),
)
"""Rows of a step with a graph that has prompts in it. Longer ones keep the device busy without one."""
FEW_ROWS = 512
FEW_SEQS, MANY_SEQS = (8, 32), (64,)
"""Sequences of such a step of at most FEW_ROWS, and of a longer one; above them, as many as a step may have."""
EXTRA_BATCH_SIZES = (1, 4, 16, 32, 64, 128, 192, 256)
EXTRA_MIXED_ROWS = (64, 256, 512, 1024, MIXED_ROWS[-1])
"""The same for steps with extras, which are rarer."""
SECONDS_BETWEEN_CAPTURES = 1.0


class Kind(NamedTuple):
    """What a step may have beside rows: extras, and adapters."""

    has_extras: bool = False
    has_adapters: bool = False


PLAIN = Kind()


def padded(size: int, sizes: tuple[int, ...], step: int) -> int:
    """The least of ``sizes`` that is not below ``size``; above them all, the next multiple of ``step``."""
    return next((known for known in sizes if known >= size), -(-size // step) * step)


def kinds(with_adapters: bool) -> list[Kind]:
    """All kinds of steps. Where there are adapters, every step with extras looks for them: there are few of these."""
    return [PLAIN, *([Kind(has_adapters=True)] if with_adapters else []), Kind(True, with_adapters)]


def padded_shape(
    num_rows: int, num_seqs: int, max_query_len: int, max_num_seqs: int, kind: Kind = PLAIN
) -> tuple[StepShape, bool]:
    """The shape that a step is brought to, and whether it is one that has a graph."""
    most_seqs = max(max_num_seqs, num_seqs)
    if max_query_len == 1:
        size = min(padded(num_seqs, EXTRA_BATCH_SIZES if kind.has_extras else BATCH_SIZES, 32), most_seqs)
        return StepShape(size, size, 1, *kind), True
    seqs = min(padded(num_seqs, _mixed_seqs(num_rows), max_num_seqs), most_seqs)
    if num_rows <= MIXED_ROWS[-1]:
        rows = padded(num_rows, EXTRA_MIXED_ROWS if kind.has_extras else MIXED_ROWS, 1)
        return StepShape(rows, seqs, rows, *kind), True
    rows = -(-num_rows // 128) * 128
    return StepShape(rows, seqs, rows, *kind), False


def _mixed_seqs(num_rows: int) -> tuple[int, ...]:
    return FEW_SEQS if num_rows <= FEW_ROWS else MANY_SEQS


def graph_shapes(max_num_seqs: int, max_num_rows: int, with_adapters: bool = False) -> list[StepShape]:
    """Every shape that has a graph, the largest first, so that the smaller ones fit into its memory.

    Those with extras come last.
    """
    shapes = set()
    for kind in kinds(with_adapters):
        for size in range(1, max_num_seqs + 1):
            shapes.add(padded_shape(size, size, 1, max_num_seqs, kind)[0])
        for rows in MIXED_ROWS:
            for seqs in (*_mixed_seqs(rows), max_num_seqs) if rows <= max_num_rows else ():
                few = min(seqs, rows - 1, max_num_seqs)
                shapes.add(padded_shape(rows, few, rows, max_num_seqs, kind)[0])
    return sorted(shapes, key=lambda shape: (not shape.has_extras, shape), reverse=True)


def first_shapes(max_num_seqs: int, max_num_rows: int, with_adapters: bool = False) -> list[StepShape]:
    """A few shapes between which every step without extras that has a graph finds one to fit into, the largest first.

    They are what a start waits for, so each stands for kernels that are worth it.
    """
    shapes = {_decode_shape(max_num_seqs, max_num_seqs)}
    for rows in (512, min(max_num_rows, MIXED_ROWS[-1])):
        if 1 < rows <= max_num_rows:
            shapes.add(padded_shape(rows, min(rows - 1, max_num_seqs), rows, max_num_seqs)[0])
    if with_adapters:
        shapes |= {shape._replace(has_adapters=True) for shape in _largest(shapes)}
    return sorted(shapes, reverse=True)


def next_shapes(max_num_seqs: int) -> list[StepShape]:
    """Shapes whose kernels follow at once, the smallest first: few sequences are faster with kernels of their own."""
    return sorted({_decode_shape(size, max_num_seqs) for size in (1, 16)})


def _decode_shape(num_seqs: int, max_num_seqs: int) -> StepShape:
    size = min(num_seqs, max_num_seqs)
    return padded_shape(size, size, 1, max_num_seqs)[0]


def first_extra_shapes(max_num_seqs: int, max_num_rows: int, with_adapters: bool = False) -> list[StepShape]:
    """The same for steps with extras."""
    kind, largest = Kind(True, with_adapters), _largest(set(first_shapes(max_num_seqs, max_num_rows)))
    return sorted((padded_shape(*shape[:3], max_num_seqs, kind)[0] for shape in largest), reverse=True)


def _largest(shapes: set[StepShape]) -> set[StepShape]:
    """The largest of steps of single rows, and the largest of all."""
    return {max(shape for shape in shapes if shape.max_query_len == 1), max(shapes)}


class Graphs:
    """Runs a function of a step's shape through graphs, captured when a shape first comes.

    Everything happens on the current stream, which must not be the default one. ``around`` gives a context for what
    is captured.
    """

    def __init__(self, run: Callable[[StepShape], None], around: Callable[[], AbstractContextManager[None]]) -> None:
        self._run = run
        self._around = around
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._compiled: list[StepShape] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._next_capture = float("inf")

    def __len__(self) -> int:
        return len(self._graphs)

    def offer(self, shapes: list[StepShape]) -> None:
        """From now on these may be captured when a step fits into none that is smaller: their kernels are compiled."""
        self._compiled += shapes

    def allow_captures(self) -> None:
        """From now on any shape may be captured: its kernels are compiled, so it takes no longer than a few steps."""
        self._next_capture = 0.0

    def fit(self, shape: StepShape) -> StepShape:
        """The shape to bring a step to: its own, or a larger one that is there or on offer.

        Between two captures that steps have to wait for lies a second, so that they are not felt.
        """
        if shape in self._graphs:
            return shape
        if time.monotonic() >= self._next_capture:
            self._next_capture = time.monotonic() + SECONDS_BETWEEN_CAPTURES
            return shape
        return min((known for known in (*self._graphs, *self._compiled) if known.holds(shape)), default=shape)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._graphs

    def __call__(self, shape: StepShape) -> None:
        """Run a step of this shape once."""
        graph = self._graphs.get(shape)
        if graph is None:
            self._graphs[shape] = self._run_and_capture(shape)
        else:
            graph.replay()

    def _run_and_capture(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        """Run, so that nothing is left to be set up; then capture, which runs nothing."""
        started = time.perf_counter()
        with without_collections(), self._around():  # a tensor freed by the collector would end the capture
            self._run(shape)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(shape)
            finally:
                graph.capture_end()
        logger.debug("captured %s in %.0f ms", shape, 1e3 * (time.perf_counter() - started))
        return graph
