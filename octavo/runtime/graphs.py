"""CUDA graphs of whole steps, one for each shape of a step.

A graph replays what ran while it was captured, with the same tensors: whatever differs from step to step must be read
on the device. Graphs share one memory pool, so only one may run at a time and its outputs hold until the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from octavo.collector import without_collections
from octavo.steps.shapes import StepShape

logger = logging.getLogger(__name__)


class Graphs:
    """Runs a function of a step's shape through graphs, captured when a shape first comes.

    Everything happens on the current stream, which must not be the default one. ``around`` gives a context for what
    is captured.
    """

    def __init__(self, run: Callable[[StepShape], None], around: Callable[[], AbstractContextManager[None]]) -> None:
        self._run = run
        self._around = around
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

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
