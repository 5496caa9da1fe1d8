"""Calls of compiled kernels: made one at a time, or recorded once and replayed by one compiled loop.

A kernel is a *driver*, compiled code that takes the pool of threads and the address of a record of arguments, and
returns 0 on success. Python prepares the record and calls ``call``. Preparation takes longer than computing a small
layer for one token, and is the same for every token: hence ``recording``. It keeps the records of all calls made
within it, and ``repeat`` makes them again, on the current contents of the same memory.

A recording is only valid if all computation in it is kernel calls. It replaces ``torch.empty``, so that results are
in its own memory, allows views, and records any other operation of torch in ``foreign``.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo_kernels.cpu.compiled import compiled, driver
from octavo_kernels.cpu.memory import call_driver, fields, read, view
from octavo_kernels.cpu.threads import pool_address, run

Arguments = npt.NDArray[np.void]
CALL = fields("driver arguments")
FIRST_ARGUMENTS = fields("task items piece")
"""What the arguments of ``task_driver`` begin with: the task's address, the number of items, how many are worth a
thread."""


@compiled
def _call(driver: int, pool: int, arguments: int) -> int:
    return call_driver(driver, pool, arguments)  # type: ignore[no-any-return]


@compiled
def _call_all(calls_at: int, num_calls: int, pool: int) -> int:
    """Make the calls in order; the index of the one that failed, or -1."""
    calls = view(calls_at, num_calls, CALL)
    for i in range(num_calls):
        if call_driver(calls[i].driver, pool, calls[i].arguments) != 0:
            return i
    return -1


def call(driver: int, kind: np.dtype[np.void], values: tuple[float, ...], error: str = "") -> None:
    """Call a driver with a record of a kind of ``fields``; raise ``IndexError(error)`` when it does not return 0."""
    arguments = np.empty(1, kind)
    arguments[0] = values
    if (current := _CURRENT.recording) is not None:
        current.add(driver, arguments, error)
        if current.is_plan:
            return
    if _call(driver, pool_address(), arguments.ctypes.data):
        raise IndexError(error)


@driver
def task_driver(pool: int, arguments: int) -> int:
    """The driver of kernels that are one task: all of its items, divided among the threads."""
    a = read(arguments, FIRST_ARGUMENTS)
    run(pool, a.task, arguments, a.items, a.piece)
    return 0


class Arena:
    """Memory for the results of calls. Memory without references is reused."""

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Like ``torch.empty`` on the CPU."""
        count = math.prod(shape)
        size = 1 << max(6, (count * dtype.itemsize - 1).bit_length())
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else np.empty(size, np.uint8)
        lent = memory[: count * dtype.itemsize]  # lives as long as the tensor's storage does
        weakref.finalize(lent, free.append, memory)
        return torch.frombuffer(lent, dtype=dtype).view(*shape) if count else torch.empty(shape, dtype=dtype)


class CallRecording:
    """Kernel calls, in order."""

    def __init__(self, is_plan: bool = False) -> None:
        self.is_plan = is_plan
        """Whether the calls are recorded alone, and not made."""
        self.foreign: set[str] = set()
        """Operations of torch that cannot be replayed; the recording is unusable if there are any."""
        self.records: list[tuple[int, Arguments, str]] = []
        self._calls: Arguments = np.zeros(0, CALL)

    def add(self, driver: int, arguments: Arguments, error: str) -> None:
        """Record a call."""
        self.records.append((driver, arguments, error))

    def close(self) -> None:
        """Finish the recording; no further calls are added."""
        self._calls = np.array([(driver, record.ctypes.data) for driver, record, _ in self.records], CALL)

    def repeat(self) -> None:
        """Replay all calls; raises the error of the first that fails."""
        failed = _call_all(self._calls.ctypes.data, len(self._calls), pool_address())
        if failed >= 0:
            raise IndexError(self.records[failed][2])


@contextlib.contextmanager
def recording(arena: Arena) -> Iterator[CallRecording]:
    """Within this block calls are executed and recorded, and ``torch.empty`` allocates from ``arena``."""
    assert _CURRENT.recording is None, "one recording at a time"
    with _recording(CallRecording(), arena) as made:
        yield made
    made.close()


def planning(arena: Arena) -> AbstractContextManager[CallRecording]:
    """Within this block calls are recorded without being made, for a driver that makes them with other rows. It may be
    within ``recording``, which does not see them."""
    return _recording(CallRecording(is_plan=True), arena)


@contextlib.contextmanager
def _recording(made: CallRecording, arena: Arena) -> Iterator[CallRecording]:
    before, _CURRENT.recording = _CURRENT.recording, made
    try:
        with _Watch(made, arena):
            yield made
    finally:
        _CURRENT.recording = before


_Mode: Any = TorchDispatchMode  # torch has no types for it


class _Watch(_Mode):  # type: ignore[misc]
    """Intercepts every operation of torch."""

    def __init__(self, made: CallRecording, arena: Arena) -> None:
        super().__init__()
        self._made, self._arena = made, arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Called by torch. Otherwise it would import its compiler to disable it, which dominates the startup time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        with self:  # inference mode passes composite operations undecomposed
            made_of_others = func.decompose(*args, **kwargs)
        if made_of_others is not NotImplemented:
            return made_of_others
        if not _is_view(func):
            self._made.foreign.add(str(func))
        return func(*args, **kwargs)


def _is_view(func: Callable[..., Any]) -> bool:
    returns = func._schema.returns  # type: ignore[attr-defined]
    return bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)


class _Current(threading.local):
    """The active recording; a thread has at most one, as engines of other threads run at the same time."""

    recording: CallRecording | None = None


_CURRENT = _Current()
