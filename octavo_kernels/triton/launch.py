"""How kernels are launched, and the settings that the runner makes around a forward pass.

Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and Synchronization") lets a
kernel start while the one before it drains. Its rules for every kernel of a step:

1. load constants (weights, norm weights, tables of angles);
2. ``after_predecessor(PDL)``: wait for the predecessor, then let the successor start;
3. the body.

A kernel that needs the full memory bandwidth calls ``wait_for_predecessor`` and, after its main loop,
``start_successor``.
As successors start only after the wait, all kernels but the last have ended when a kernel starts: before its wait it
may read what was written at least two kernels earlier, and nothing younger.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from octavo.system.background_threads import BackgroundPool, stop_if_ending
from octavo.system.kernel_compiler import Compilers, CompilersLost, compilers, preparation
from octavo_kernels.triton.compile_jobs import described

T = TypeVar("T")
logger = logging.getLogger(__name__)

HOPPER = (9, 0)
GLUON_VERSION = "3.6."
"""Triton version that the kernels in Gluon, whose interface is not stable, were tested with."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_pdl = ContextVar("pdl", default=False)
_invariant = ContextVar("invariant", default=False)
_grid_barriers = ContextVar("grid_barriers", default=True)
_compiling: ContextVar[set[Any] | frozenset[Any] | None] = ContextVar("compiling", default=None)
"""Kernels that are being compiled, where none is run; a frozen set where none is compiled either."""


def use_pdl() -> bool:
    """Whether kernels are launched with programmatic dependent launch."""
    return _pdl.get()


def empty_indices(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for results that are used as indices. While kernels are compiled and none is launched it
    holds zeros, as torch's own operations are run with it then, too."""
    make = torch.empty if _compiling.get() is None else torch.zeros
    return make(size, dtype=dtype, device=device)


@contextlib.contextmanager
def pdl() -> Iterator[None]:
    """Launch with programmatic dependent launch in this block; no effect on devices that lack it.

    It costs host time for each launch, so it is for the capture of CUDA graphs, where launches are recorded once.
    """
    with _set(_pdl, torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER):
        yield


@contextlib.contextmanager
def no_pdl() -> Iterator[None]:
    """In this block a kernel starts when the one before it has ended, and the next one when it has ended itself."""
    with _set(_pdl, False):
        yield


def is_invariant() -> bool:
    """Whether a row's result may depend on nothing but that row, to the bit."""
    return _invariant.get()


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """In this block a row's result does not depend on the number of rows or on the other rows, to the bit."""
    with _set(_invariant, True):
        yield


def allows_grid_barriers() -> bool:
    """Whether kernels may have grid-wide barriers, for which all programs must be resident at once."""
    return _grid_barriers.get()


@contextlib.contextmanager
def no_grid_barriers() -> Iterator[None]:
    """In this block no kernel with a grid-wide barrier is launched. Two of them on two streams of a process could each
    hold a part of the device and wait for the rest for ever."""
    with _set(_grid_barriers, False):
        yield


def is_compiling() -> bool:
    """Whether launches run nothing."""
    return _compiling.get() is not None


@contextlib.contextmanager
def compiling(num_threads: int | None = None) -> Iterator[None]:
    """Compile the kernels launched in this block; run none.

    They are compiled by the processes of ``compilers``, each as soon as it is known. Without any, ``num_threads``
    (default: all processors) compile at a time, once all kernels are known: much of it is Python, and so many threads
    would starve the block itself.
    """
    preparation().join()
    processes = compilers()
    are_known = threading.Event()
    if processes is not None:
        are_known.set()
    count = processes.count if processes else num_threads or os.cpu_count()
    with (
        BackgroundPool(count, initializer=are_known.wait) as pool,
        triton.AsyncCompileMode(_Compiling(pool, processes)),
        _set(_compiling, set()),
    ):
        try:
            yield
        finally:
            are_known.set()


class _Compiling(Executor):
    """What Triton gives its compilations to."""

    def __init__(self, pool: BackgroundPool, processes: Compilers | None) -> None:
        self._pool, self._processes = pool, processes

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(self._compile, work)

    def _compile(self, work: Callable[[], Any]) -> Any:
        """The kernel that ``work`` returns, which finds in the cache what another process has compiled.

        Triton has a C compiler build a launcher when a kernel first runs, one kernel after another. They are built here
        as well, in parallel, and are then found in its cache.
        """
        if self._processes is not None and (job := described(work)) is not None:
            with contextlib.suppress(CompilersLost):
                if failure := self._processes.compile(job):
                    logger.debug("a kernel that a process could not compile: %s", failure)
            stop_if_ending()
        kernel = work()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Run and compile none of the kernels launched in this block."""
    with _set(_compiling, frozenset()):
        yield


MOST_BESIDE = 2**16 - 1
"""Programs on the second axis of a grid, and on the third; the first has room for 2 ** 31."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, is_early: bool = True, **options: Any) -> None:
    """Launch ``kernel[grid]``; its ``PDL`` argument, and the launch itself, follow ``use_pdl()``.

    Without ``is_early`` it starts when the kernel before it has ended. Then all multiprocessors are free, and programs
    that are small are dealt out to them evenly.
    """
    options |= {"PDL": use_pdl(), "launch_pdl": use_pdl() and is_early}
    if (compiling := _compiling.get()) is None:
        kernel[grid](*args, **options)
    elif isinstance(compiling, set):
        compiling.add(kernel.warmup(*args, grid=grid, **options))


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr) -> None:
    """Wait until the kernel before this one has ended and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def start_successor(PDL: tl.constexpr) -> None:
    """Let the next kernel start, once all programs of this one have called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def after_predecessor(PDL: tl.constexpr) -> None:
    """Wait for the kernel before this one, then let the next one start."""
    wait_for_predecessor(PDL)
    start_successor(PDL)


@triton.jit
def prefetch_lines(rows: tl.tensor, COUNT: tl.constexpr) -> None:
    """Bring COUNT numbers at each of these addresses, [rows, 1], into the second-level cache, in lines of 128 bytes."""
    LINES: tl.constexpr = (COUNT * rows.dtype.element_ty.primitive_bitwidth // 8 + 127) // 128
    WIDTH: tl.constexpr = triton.next_power_of_2(LINES)
    line = tl.arange(0, WIDTH)
    line = tl.minimum(line, LINES - 1)
    at = rows.to(tl.int64) + line[None, :] * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def counters(device: torch.device, number: int) -> Tensor:
    """Counters that synchronise programs of a kernel: zero between launches. Never freed, as captured graphs use them.

    Kernels with the same ``number`` share them, as kernels of a stream run one after another.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "a kernel with counters must have run once before it is captured in a graph"
    return torch.zeros(number, dtype=torch.int32, device=device)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a few on the CPU, where only the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 99 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def has_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run here."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    return is_hopper and triton.__version__.startswith(GLUON_VERSION)


def has_assembly(device: torch.device) -> bool:
    """Whether kernels for this device may contain PTX; not in Triton's interpreter."""
    return device.type == "cuda" and torch.version.hip is None


def declines_floats(dtype: torch.dtype) -> str | None:
    """Why kernels for floats cannot take this dtype, or ``None``."""
    return None if dtype in FLOATS else f"they take {', '.join(map(str, FLOATS))}; this is {dtype}"


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
