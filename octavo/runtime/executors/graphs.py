"""CUDA graphs of what runs again and again: steps, and the towers of images."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

from octavo.ops.device_captures import captured
from octavo.system.garbage_collection import without_collections

logger = logging.getLogger(__name__)
Form = TypeVar("Form", bound=Hashable)
"""What decides which kernels run: the shape of a step, or of an image."""


class Graphs(Generic[Form]):
    """Runs a function of a form through CUDA graphs; each form is captured on first use.

    Everything runs on the current stream, which must not be the default one. ``around`` returns a context manager that
    is active during capture.
    """

    def __init__(self, run: Callable[[Form], None], around: Callable[[], AbstractContextManager[None]]) -> None:
        self._run = run
        self._around = around
        self._graphs: dict[Form, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, form: Form) -> None:
        """Run it once."""
        graph = self._graphs.get(form)
        if graph is None:
            self._graphs[form] = self._run_and_capture(form)
        else:
            graph.replay()

    def clear(self) -> None:
        """Discard all graphs with their memory, while none runs; they are captured again on next use."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _run_and_capture(self, form: Form) -> torch.cuda.CUDAGraph:
        """Run once, so that all lazy initialisation is done; then capture, which executes nothing.

        A capture allocates in a pool of its own and cannot take memory that is cached elsewhere, so caches are emptied.
        """
        started = time.perf_counter()
        with without_collections(), self._around():  # a tensor freed by the collector would end the capture
            self._run(form)
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            with captured(graph, self._pool):
                self._run(form)
        logger.debug("captured %s in %.0f ms", form, 1e3 * (time.perf_counter() - started))
        return graph
