"""Two processes that compile at once, with nothing in the folder yet: each variant keeps its own code."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

from octavo_kernels.cpu import threads
from octavo_kernels.cpu.background import compile_rare, compiling_in_background, in_background
from octavo_kernels.cpu.compiled import cache_folder, compiled, compiled_task, is_missing
from octavo_kernels.cpu.memory import call_task, view
from tests.ops.cpu_cases import needs_float_kernels

pytestmark = needs_float_kernels

forked: Any = multiprocessing.get_context("fork")

KERNEL = """from octavo_kernels.cpu.compiled import compiled

@compiled
def result(x):
    return {}
"""


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


@pytest.mark.skipif(not hasattr(numba.config, "CACHE_LOCATOR_CLASSES"), reason="this numba looks for code by path")
def test_a_copy_of_a_module_finds_its_code_compiled_and_a_changed_one_does_not(
    empty_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def found(formula: str) -> tuple[int, dict[Path, int]]:
        source = tmp_path_factory.mktemp("copy") / "kernel.py"
        source.write_text(KERNEL.format(formula))
        spec = importlib.util.spec_from_file_location("some.kernel", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.result(3), {path: path.stat().st_mtime_ns for path in empty_folder.rglob("*.nbc")}

    value, kept = found("x + 1")
    assert value == 4
    assert len(kept) == 1
    assert found("x + 1") == (4, kept)
    assert found("x + 2")[0] == 5


def test_a_process_that_keeps_a_lock_is_not_waited_for_forever(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_kernels.cpu.compiled.LONGEST_WAIT", 0.1)
    assert _task_gives(0)
    with contextlib.ExitStack() as files:
        for path in empty_folder.rglob("*.lock"):
            fcntl.flock(files.enter_context(path.open()), fcntl.LOCK_EX)
        assert _task_gives(1)


@pytest.mark.parametrize("is_right", [_task_gives, _double_gives])
@pytest.mark.parametrize("step", ["_save_index", "_save_data"])
def test_on_a_full_disk_kernels_are_compiled_in_memory(
    is_right: Callable[[int], bool],
    step: str,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(IndexDataCacheFile, step, fail)
        assert is_right(0)
        assert is_right(1)
    assert "No space left" in caplog.text
    assert not list(empty_folder.rglob("*.nbc"))
    assert is_right(0), "and what is half kept is no obstacle"


def test_a_folder_that_cannot_be_made_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file"))
    cache_folder.cache_clear()
    assert cache_folder() is None
    assert _double_gives(1)
    assert _task_gives(1)
    assert "compiled kernels cannot be kept" in caplog.text
    cache_folder.cache_clear()


@pytest.fixture
def two_cores() -> Iterator[None]:
    threads.set_num_threads(2)
    yield
    threads.set_num_threads(1)


def test_kernels_compiled_in_the_background_are_only_loaded(empty_folder: Path, two_cores: None) -> None:
    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in empty_folder.rglob("*write*.nb*")}

    assert is_missing(_task_gives)
    done, ready = forked.Event(), forked.Event()

    def work() -> None:
        _task_gives(1)
        done.set()
        ready.wait()

    with in_background(work):
        assert done.wait(60)
        before = written()
        assert before
        assert _task_gives(1)
        assert written() == before
    assert not is_missing(_task_gives)


def test_works_of_the_background_share_the_cores_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_threads, num_processes in ((2, 1), (3, 2), (8, 2)):
        monkeypatch.setattr("octavo_kernels.cpu.background.num_threads", lambda count=num_threads: count)
        pids = forked.Array("q", 2)
        done = [forked.Event(), forked.Event()]

        def work(i: int, pids: Any = pids, done: Any = done) -> None:
            pids[i] = os.getpid()
            done[i].set()

        with in_background(*(functools.partial(work, i) for i in range(2))):
            assert all(event.wait(60) for event in done)
        assert len(set(pids)) == num_processes
        assert os.getpid() not in pids


@functools.cache
def _rare_task() -> int:
    def write(arguments: int, begin: int, end: int) -> None:
        view(arguments, 1, np.int64)[0] = 7

    return compiled_task(write)


@pytest.fixture
def rare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The only kernel that is used rarely."""
    _rare_task.cache_clear()
    for module in ("background", "compiled"):
        monkeypatch.setattr(f"octavo_kernels.cpu.{module}.RARE", [_rare_task])
    return _rare_task


def test_rare_kernels_are_compiled_by_another_process_and_then_loaded(
    rare: Any, empty_folder: Path, two_cores: None
) -> None:
    with global_compiler_lock:  # so that nothing can be loaded here before it was looked at
        compile_rare()
        deadline = time.monotonic() + 60
        while not any(empty_folder.rglob("*.nbc")) and time.monotonic() < deadline:  # numba writes it last
            time.sleep(0.01)
        assert not is_missing(rare)
        assert rare.cache_info().currsize == 0
        kept = {path: path.stat().st_mtime_ns for path in empty_folder.rglob("*.nb*")}
        assert kept
    while rare.cache_info().currsize == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rare.cache_info().currsize == 1
    assert {path: path.stat().st_mtime_ns for path in empty_folder.rglob("*.nb*")} == kept


def test_a_rare_kernel_that_nothing_compiled_is_compiled_when_it_is_needed(
    rare: Any, empty_folder: Path, two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []
    monkeypatch.setattr("octavo_kernels.cpu.background.start_thread", lambda *args: began.append(args))
    compile_rare()
    ((_, load_after, child),) = began
    os.kill(child, signal.SIGKILL)
    load_after(child)
    assert rare.cache_info().currsize == 0
    assert rare()


def test_rare_kernels_are_loaded_at_once_when_they_are_there_or_on_one_core(
    rare: Any, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    for num_threads in (1, 2):
        threads.set_num_threads(num_threads)
        rare.cache_clear()
        compile_rare()
        assert rare.cache_info().currsize == 1
    threads.set_num_threads(1)


def test_a_background_process_ends_with_the_block_and_with_its_parent(two_cores: None) -> None:
    pid = forked.Value("q", 0)

    def work_long() -> None:
        pid.value = os.getpid()
        time.sleep(60)

    def is_gone() -> bool:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            status = Path(f"/proc/{pid.value}/stat")
            if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            time.sleep(0.01)
        return False

    def begin_and_vanish() -> None:
        with in_background(work_long):
            while not pid.value:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    with in_background(work_long):
        while not pid.value:
            time.sleep(0.01)
    assert is_gone()
    pid.value = 0
    process = forked.Process(target=begin_and_vanish)
    process.start()
    process.join()
    assert is_gone()


def test_no_background_process_on_one_core_or_when_nothing_is_missing(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    threads.set_num_threads(1)
    with compiling_in_background(torch.float16):
        pass
    (empty_folder / "attention_tiles.attend_task.locals.attend-1.py311.nbi").touch()
    monkeypatch.setattr("octavo_kernels.cpu.compiled.cache_folder", lambda: empty_folder)
    threads.set_num_threads(2)
    with compiling_in_background(torch.float16):
        pass
    threads.set_num_threads(1)
