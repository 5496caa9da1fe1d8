"""The driver of kernels that are one task: all of its items, divided among the threads."""

from __future__ import annotations

import functools

from octavo_kernels.cpu.compiled import compiled_driver
from octavo_kernels.cpu.memory import fields, read
from octavo_kernels.cpu.threads import run

FIRST_ARGUMENTS = fields("task items piece")
"""What the arguments of such a task begin with: its address, the number of items, and how many are worth a thread."""


@functools.cache
def task_driver() -> int:
    """Its address, for ``calls.call``."""

    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, FIRST_ARGUMENTS)
        run(pool, a.task, arguments, a.items, a.piece)
        return 0

    return compiled_driver(drive)
