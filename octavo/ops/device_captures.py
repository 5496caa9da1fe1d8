"""Captures of CUDA graphs, and waits for a whole device, which exclude each other in a process.

A wait for the device, whatever thread and engine it is of, fails while any stream of the process is captured, and ends
the capture in failure, in every capture mode (CUDA programming guide, "Prohibited and Unhandled Operations").
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_lock = threading.Lock()


@contextlib.contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is launched on the current stream in this block, with memory of ``pool``; it must wait for nothing.

    Other threads may allocate meanwhile.
    """
    with _lock:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def wait_for_device(device: torch.device | None = None) -> None:
    """Wait for all work of a device, by default the current one, in a block of no ``captured``."""
    with _lock:
        torch.cuda.synchronize(device)
