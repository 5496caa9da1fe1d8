"""Compiles kernels for an engine process, each in a child of its own, into the cache that both share.

It reads lines: of a batch first its target (JSON: backend, architecture, threads of a warp), then one line for each
kernel, as Triton's cache hook describes it, then an empty one; and answers a batch with a line when all of it is done.
It uses no GPU, and ends when its input does. A child that fails says nothing: the engine process compiles that kernel
again, and meets the same error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import octavo.ops.triton  # noqa: F401 (imported once, for all children)
from octavo.ops.triton.launch import settle_key


class AbsentDevice:
    """What the compiler asks of a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def _nothing() -> None:
    pass


def _compile(specialization: str) -> None:
    module, _, name = json.loads(specialization)["name"].rpartition(".")
    kernel = getattr(importlib.import_module(module), name)
    settle_key(kernel)
    kernel.preload(specialization)


def _compile_in_child(specialization: str) -> None:
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            _compile(specialization)
        os._exit(0)


def _serve(lines: Iterator[str], most: int) -> None:
    """Answer one batch, with at most so many children at a time."""
    target = GPUTarget(*json.loads(next(lines)))
    driver.set_active(AbsentDevice(target))
    running = 0
    for line in lines:
        if not line.strip():
            break
        if running == most:
            os.wait()
            running -= 1
        _compile_in_child(line)
        running += 1
    for _ in range(running):
        os.wait()


def main() -> None:
    """Serve batches until there are no more."""
    # What the compiler does when it is first used is done once, before there are children.
    driver.set_active(AbsentDevice(GPUTarget("cuda", 90, 32)))
    _nothing.warmup(grid=(1,))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(StopIteration):
        while True:
            _serve(sys.stdin, os.cpu_count() or 1)
            print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
