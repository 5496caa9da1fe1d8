"""Kernels are compiled by children of this process: compiling is Python for the most part, and a process has one lock.

What the children compile, this process finds in Triton's cache; what they do not, it compiles itself when it loads it.
So nothing but time depends on them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

MAX_SECONDS = 60.0
"""A child that takes longer is ended: other threads of this process may have held a lock when it was made."""
POLL_SECONDS = 0.002
FIRST_OWN_FILE, MAX_FILES = 3, 1 << 20
_NUMBER = struct.Struct("<H")
_warming = threading.Lock()


class AbsentDevice:
    """What the compiler asks of a driver, in a process that must not touch the GPU."""

    def __init__(self, device: int, target: object) -> None:
        self._device = device
        self._target = target

    def get_current_device(self) -> int:
        return self._device

    def get_current_target(self) -> object:
        return self._target


def compile_in_children(kernels: Mapping[str, Any]) -> None:
    """Put kernels into Triton's cache, as many at a time as there are processors.

    They are given by what they are compiled for, as Triton's cache hook describes it.
    """
    if not kernels:
        return
    warm_up()
    absent = AbsentDevice(driver.active.get_current_device(), driver.active.get_current_target())
    numbers, end = os.pipe()
    os.write(end, b"".join(map(_NUMBER.pack, range(len(kernels)))))
    os.close(end)
    children = set()
    with contextlib.suppress(OSError):  # of so many, some may find no memory
        for _ in range(min(len(kernels), os.cpu_count() or 1)):
            if (pid := os.fork()) == 0:
                _compile_some(list(kernels.items()), numbers, absent)
            children.add(pid)
    os.close(numbers)
    deadline = time.monotonic() + MAX_SECONDS
    while children:
        children = {pid for pid in children if not _has_ended(pid)}
        if children and time.monotonic() > deadline:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _compile_some(kernels: list[tuple[str, Any]], numbers: int, absent: AbsentDevice) -> None:
    """The whole life of a child: compile those whose numbers it gets. What fails is met again by the parent."""
    try:
        gc.disable()  # what it would free is the parent's
        os.dup2(numbers, FIRST_OWN_FILE)
        os.closerange(FIRST_OWN_FILE + 1, MAX_FILES)  # who waits for the parent's end looks at these
        driver.set_active(absent)
        while number := os.read(FIRST_OWN_FILE, _NUMBER.size):
            data, kernel = kernels[_NUMBER.unpack(number)[0]]
            with contextlib.suppress(Exception):
                kernel.preload(data)
    finally:
        os._exit(0)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # somebody else has waited for it
        return True


def warm_up() -> None:
    """Let the compiler do what it does when it is first used, a digest of all its files among it.

    It takes a second or two. Whoever calls this early, beside other work, has less to wait for; each child would do it.
    """
    with _warming:
        _compile_nothing()


@functools.cache
def _compile_nothing() -> None:
    triton.compile(ASTSource(_nothing, {}, {}), target=GPUTarget("cuda", 90, 32))


@triton.jit
def _nothing() -> None:
    pass


def settle_key(kernel: Any) -> None:
    """Give a kernel the key by which parent and children find it in Triton's cache.

    The constants of a function that it calls are part of it only if that one has its key already (Triton 3.6), so what
    a process finds would depend on what it compiled before.
    """
    for name in kernel.fn.__code__.co_names:
        callee = kernel.fn.__globals__.get(name)
        if isinstance(callee, triton.JITFunction) and callee.hash is None:
            settle_key(callee)
    _ = kernel.cache_key
