"""The preparation of the kernel compiler during startup."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.system import kernel_compiler

_preparation = kernel_compiler.preparation


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Forget earlier preparations in this process."""
    _preparation.cache_clear()
    yield
    _preparation.cache_clear()


def test_it_is_prepared_once_and_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go, digests = threading.Event(), []

    def triton_key() -> None:
        go.wait(30)
        digests.append(threading.current_thread())

    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=triton_key))
    thread = kernel_compiler.preparation()
    assert kernel_compiler.preparation() is thread
    assert thread.is_alive()
    go.set()
    thread.join(30)
    assert digests == [thread]


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_another_triton_or_none_is_no_error(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", module)
    kernel_compiler.preparation().join(30)
    assert not errors


def test_only_where_there_may_be_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[int] = []
    monkeypatch.setattr(kernel_compiler, "preparation", lambda: begun.append(1))
    monkeypatch.setattr(kernel_compiler, "start_compilers", lambda: None)
    monkeypatch.setattr(kernel_compiler, "NVIDIA_DRIVER", tmp_path / "none")
    kernel_compiler.prepare_if_there_may_be_a_gpu("auto")
    monkeypatch.setattr(kernel_compiler, "NVIDIA_DRIVER", tmp_path)
    kernel_compiler.prepare_if_there_may_be_a_gpu("cpu")
    assert not begun
    kernel_compiler.prepare_if_there_may_be_a_gpu("auto")
    assert begun


def test_each_gpu_has_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts: list[int] = []
    monkeypatch.setattr(kernel_compiler, "DEVICES", tmp_path)
    monkeypatch.setattr(kernel_compiler, "Compilers", lambda count, module: counts.append(count))
    for num_cpus, num_gpus in ((32, 0), (32, 2), (8, 8), (400, 4)):
        for i in range(num_gpus):
            (tmp_path / f"nvidia{i}").touch()
        monkeypatch.setattr(kernel_compiler, "num_cpus", lambda num=num_cpus: num)
        monkeypatch.setattr(kernel_compiler, "_running", [])
        kernel_compiler.start_compilers()
    assert counts == [kernel_compiler.MOST_PROCESSES, 15, kernel_compiler.MOST_PROCESSES]
