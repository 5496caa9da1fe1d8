"""CUDA graphs of complete steps, one for each padded batch shape.

A graph replays the captured kernels with the same tensors, so everything that differs between steps must be read on
the device. Graphs share one memory pool: only one may run at a time, and its outputs are valid until the next one runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from octavo.steps.shapes import StepShape
from octavo.system.collector import without_collections

logger = logging.getLogger(__name__)


class Graphs:
    """Runs a function of a step's shape through CUDA graphs; each shape is captured on first use.

    Everything runs on the current stream, which must not be the default one. ``around`` returns a context manager that
    is active during capture.
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

    def clear(self) -> None:
        """Discard all graphs with their memory, while none runs; they are captured again on next use."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _run_and_capture(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        """Run once, so that all lazy initialisation is done; then capture, which executes nothing.

        A capture allocates in a pool of its own and cannot take memory that is cached elsewhere, so caches are emptied.
        """
        started = time.perf_counter()
        with without_collections(), self._around():  # a tensor freed by the collector would end the capture
            self._run(shape)
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(shape)
            finally:
                graph.capture_end()
        logger.debug("captured %s in %.0f ms", shape, 1e3 * (time.perf_counter() - started))
        return graph
