"""The backend of GPUs: kernels of Triton, their compilation and choice, and memory that ranks map from each other.

Triton may be absent where there is no GPU: what needs it is imported late.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from octavo.ops.collective import Collective
from octavo.ops.device_backend import DeviceBackend, Tuner
from octavo.plugins import GPU
from octavo.system.kernel_archive import KernelFiles, shipped
from octavo.system.kernel_compiler import preparation, start_compilers
from octavo_kernels.registration import decline_all, import_all


class TritonBackend(DeviceBackend):
    """See ``DeviceBackend``."""

    _loading: threading.Thread | None = None

    @functools.cached_property
    def _absence(self) -> str | None:
        try:
            importlib.import_module("triton")
        except ImportError as error:  # torch brings it on Linux only
            return f"triton cannot be imported: {error}"
        return None

    def load_kernels(self) -> None:
        if self._absence is not None:
            decline_all(GPU, "triton", self._absence)
            return
        import_all("octavo_kernels.triton")

    def start_loading(self, kernel_cache: str | None = None) -> None:
        start_compilers()
        preparation()
        device = torch.device(GPU, torch.cuda.current_device())  # another thread has another one
        self._loading = threading.Thread(target=self._load, args=(device, kernel_cache), name="load kernels")
        self._loading.daemon = True
        self._loading.start()

    def _load(self, device: torch.device, kernel_cache: str | None) -> None:
        path = kernel_cache or shipped(torch.cuda.get_device_name(device))
        if self._absence is None and path is not None:
            self._files(device).take(Path(path).expanduser())
        self.load_kernels()

    def _loaded(self) -> None:
        if self._loading is not None:
            self._loading.join()

    def _files(self, device: torch.device) -> KernelFiles:
        from triton import knobs
        from triton.runtime.cache import FileCacheManager

        measured = self.measurements(device)
        key = {name: importlib.import_module(name).__version__ for name in ("octavo", "torch", "triton")}
        key["GPU"] = torch.cuda.get_device_name(device)
        key["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        key["measured kernels"] = measured.stem[-8:]
        return KernelFiles(key, Path(knobs.cache.dir), FileCacheManager, measured)

    def pack_kernels(self, path: Path, device: torch.device) -> int:
        return self._files(device).pack(path)

    def launched_early(self) -> AbstractContextManager[None]:
        """By programmatic dependent launch."""
        from octavo_kernels.triton.launch import pdl

        return pdl()

    def batch_invariant(self) -> AbstractContextManager[None]:
        from octavo_kernels.triton.launch import invariant

        return invariant()

    def without_grid_barriers(self) -> AbstractContextManager[None]:
        from octavo_kernels.triton.launch import no_grid_barriers

        return no_grid_barriers()

    def compiled_only(self, num_threads: int | None = None) -> AbstractContextManager[None]:
        self._loaded()
        from octavo_kernels.triton.launch import compiling

        return compiling(num_threads)

    def tuner(self, run: Callable[[], None], device: torch.device) -> Tuner:
        from octavo_kernels.triton.tuning.product_calls import collecting
        from octavo_kernels.triton.tuning.product_tuning import ProductTuner, uses_of

        self._loaded()
        with collecting() as calls:
            run()
        return ProductTuner(uses_of(calls), device)

    def use_measured(self, entries: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        from octavo_kernels.triton.tuning.product_tuning import use_entries

        use_entries(entries, device)

    def measurements(self, device: torch.device) -> Path:
        from octavo_kernels.triton.config_tables import own_path

        return own_path(device)

    def peer_collective(self, host: Collective, device: torch.device) -> Collective | None:
        from octavo_kernels.triton.collective import PeerCollective, buffer_bytes
        from octavo_kernels.triton.peer_memory import mapped_buffers

        addresses_W = mapped_buffers(host, buffer_bytes(host.size), device)
        return None if addresses_W is None else PeerCollective(addresses_W, host.rank)

    def peer_bytes(self, num_ranks: int) -> int:
        if num_ranks == 1 or self._absence is not None:
            return 0
        from octavo_kernels.triton.collective import buffer_bytes

        return buffer_bytes(num_ranks)


BACKEND = TritonBackend()
