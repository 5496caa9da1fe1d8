"""Two processes that compile at once, with nothing in the folder yet: each variant keeps its own code."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from octavo.ops.cpu.compiled import cache_folder, compiled, compiled_task
from octavo.ops.cpu.memory import call_task, view
from tests.ops.cpu_cases import needs_float_kernels

pytestmark = needs_float_kernels

forked: Any = multiprocessing.get_context("fork")


def _task_gives(number: int) -> bool:
    """Whether a task of which ``number`` is a constant writes that number."""

    def write(arguments: int, begin: int, end: int) -> None:
        view(arguments, 1, np.int64)[0] = number

    @compiled
    def call(task: int, arguments: int) -> None:
        call_task(task, arguments, 0, 0)

    out = np.zeros(1, np.int64)
    call(compiled_task(write), out.ctypes.data)
    return bool(out[0] == number)


def _double_gives(number: int) -> bool:
    """Whether a function gives what it should for one of two types of arguments."""

    @compiled
    def double(x: float) -> float:
        return x + x

    return bool(double((3, 2.5)[number]) == (6, 5.0)[number])


def _compile_at_once(is_right: Callable[[int], bool], number: int, both: Any, ready: Any) -> None:
    """In a process of its own: look at the index while the other one does, unless that one waits for this."""
    cache: Any = IndexDataCacheFile
    save_index = cache._save_index

    def save_late(self: Any, overloads: Any) -> None:
        if "double" in self._index_name or "write" in self._index_name:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1)
        save_index(self, overloads)

    cache._save_index = save_late
    ready.wait()
    assert is_right(number)


def _compile_both(is_right: Callable[[int], bool]) -> None:
    assert is_right(0)
    assert is_right(1)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    cache_folder.cache_clear()
    yield tmp_path
    cache_folder.cache_clear()


@pytest.mark.parametrize("is_right", [_task_gives, _double_gives])
def test_processes_that_compile_variants_at_once_keep_both(is_right: Callable[[int], bool], empty_folder: Path) -> None:
    both, ready = forked.Barrier(2), forked.Barrier(2)

    def run(*processes: Any) -> dict[Path, int]:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * len(processes)
        return {path: path.stat().st_mtime_ns for path in empty_folder.rglob("*.nb*")}

    at_once = [forked.Process(target=_compile_at_once, args=(is_right, i, both, ready)) for i in range(2)]
    kept = run(*at_once)
    assert kept
    assert run(forked.Process(target=_compile_both, args=(is_right,))) == kept, "compiled again"
