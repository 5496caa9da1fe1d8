"""How kernels are launched, and the two settings that the runner makes around a forward pass.

Programmatic dependent launch (CUDA programming guide, section 6.2.8.1) lets a kernel start while the one before it
drains. Its rules for every kernel of a step, kept by calling ``after_predecessor``:

1. load constants (weights, norm weights, tables of angles);
2. wait for the predecessor, then release the successor, with ``after_predecessor(PDL)``;
3. the body.

As successors are released only after the wait, all kernels but the last have ended when a kernel starts:
before its wait it may read what was written at least two kernels earlier, and nothing younger.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)

_pdl = ContextVar("pdl", default=False)
_invariant = ContextVar("invariant", default=False)


def use_pdl() -> bool:
    """Whether kernels are launched with programmatic dependent launch."""
    return _pdl.get()


@contextlib.contextmanager
def pdl() -> Iterator[None]:
    """Launch with programmatic dependent launch in this block; no effect on devices that lack it.

    It costs host time for each launch, so it is for the capture of CUDA graphs, where launches are recorded once.
    """
    with _set(_pdl, torch.cuda.is_available() and _capability(torch.cuda.current_device()) >= HOPPER):
        yield


def is_invariant() -> bool:
    """Whether a row's result may depend on nothing but that row, to the bit."""
    return _invariant.get()


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """In this block a row's result does not depend on the number of rows or on the other rows, to the bit."""
    with _set(_invariant, True):
        yield


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch ``kernel[grid]``; its ``PDL`` argument, and the launch itself, follow ``use_pdl()``."""
    kernel[grid](*args, PDL=use_pdl(), launch_pdl=use_pdl(), **options)


@triton.jit
def after_predecessor(PDL: tl.constexpr) -> None:
    """Wait until the kernel before this one is complete and its writes are visible, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a few on the CPU, where only the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@contextlib.contextmanager
def _set(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
