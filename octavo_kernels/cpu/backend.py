"""The backend of CPUs: kernels of numba, recorded calls, and memory that ranks share."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from octavo.ops.device_backend import DeviceBackend, Recorder, SharedMemory
from octavo.plugins import CPU
from octavo_kernels.registration import decline_all, import_all


class CPUBackend(DeviceBackend):
    """See ``DeviceBackend``."""

    keeps_marked_states = True

    def load_kernels(self) -> None:
        try:
            importlib.import_module("numba")
        except ImportError as error:  # not installed, or not built for this Python or numpy
            decline_all(CPU, "numba", f"numba cannot be imported: {error}")
        else:
            import_all("octavo_kernels.cpu")

    def compiling_in_background(self, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
        from octavo_kernels.cpu.background import compiling_in_background

        return compiling_in_background(kv_dtype)

    def compile_rare(self) -> None:
        from octavo_kernels.cpu.background import compile_rare

        compile_rare()

    def set_num_threads(self, count: int) -> None:
        """Of compiled kernels; torch has one, as its spinning threads would occupy the cores."""
        from octavo_kernels.cpu import threads

        torch.set_num_threads(1)
        threads.set_num_threads(count)

    @contextlib.contextmanager
    def torch_threads(self) -> Iterator[None]:
        from octavo_kernels.cpu.threads import num_threads

        before = torch.get_num_threads()
        torch.set_num_threads(num_threads())
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def describe(self) -> Iterator[tuple[str, str]]:
        from octavo_kernels.cpu.host import USED_FEATURES, cpu_features

        there = [name for name in USED_FEATURES if name in cpu_features()]
        yield "features", " ".join(there) or "none that kernels use"
        if absent := [name for name in USED_FEATURES if name not in there]:
            yield "", f"missing: {' '.join(absent)}"

    def compiled_kernels(self) -> Path:
        from octavo_kernels.cpu.compiled import kernels_folder

        return kernels_folder()

    def recorder(self) -> Recorder:
        from octavo_kernels.cpu.calls import Arena, recording

        return partial(recording, Arena())

    def shared_memory(self) -> SharedMemory:
        from octavo_kernels.cpu.rank_memory import SharedFile

        return SharedFile()


BACKEND = CPUBackend()
