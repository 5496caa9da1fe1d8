"""Frees the device memory of an executor and restores it: weights meanwhile are in page-locked host memory.

Tensors stay the same objects; only their storages are emptied, and later filled again at addresses that may be others.
So whatever keeps raw addresses, such as a CUDA graph, must be discarded by the caller.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable
from types import FunctionType, ModuleType

import torch
from torch import Tensor, UntypedStorage

from octavo.errors import RunnerError
from octavo.ops.device_backend import is_gpu
from octavo.ops.device_captures import wait_for_device
from octavo.runtime.memory_budget import GIB, free_memory
from octavo.types import MEMORY_PARTS, MemoryPart

HOST = torch.device("cpu")


class SleepingMemory:
    """The storages of a device that can be reached from one object, and their copy in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: Tensor | None = None
        """Kept for the next sleep: to page-lock memory takes longer than to copy it."""
        self._kept: list[tuple[UntypedStorage, int]] = []
        """Storages with their sizes in bytes, in the order in which the host memory has their contents."""
        self._lost: list[tuple[UntypedStorage, int]] = []

    @property
    def is_freed(self) -> bool:
        """Whether anything was freed and not restored."""
        return bool(self._kept or self._lost)

    def free(self, owner: object, without_content: Iterable[Tensor] = ()) -> None:
        """Free all device memory that ``owner`` refers to, directly or not; that of some tensors need not be kept.

        No kernel may use it any more. A part that was not restored since the last call stays as it is. Raises
        ``RunnerError``, and frees nothing, if the host has too little memory.
        """
        lost = _storages(without_content)
        every = _storages(device_tensors(owner, self._device.type))
        if not self._kept:  # else the host memory has their contents
            kept = [storage for at, storage in every.items() if at not in lost]
            host = self._host_memory(sum(storage.nbytes() for storage in kept))
            self._kept = [(storage, storage.nbytes()) for storage in kept]
            for storage, place in self._places(host):
                place.copy_(_content(storage), non_blocking=True)
            self._wait()
        self._lost += [(storage, storage.nbytes()) for storage in lost.values()]
        for storage, _ in (*self._kept, *self._lost):
            storage.resize_(0)
        if is_gpu(self._device):
            torch.cuda.empty_cache()

    def restore(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Allocate it again and copy back what was kept, the part ``"weights"``. Raises ``torch.OutOfMemoryError``."""
        assert self._host is not None, "nothing was freed"
        if "kv_cache" in parts:
            for storage, size in self._lost:
                storage.resize_(size)
            self._lost = []
        if "weights" in parts:
            for storage, size in self._kept:
                storage.resize_(size)
            for storage, place in self._places(self._host):
                _content(storage).copy_(place, non_blocking=True)
            self._wait()
            self._kept = []

    def _places(self, host: Tensor) -> Iterable[tuple[UntypedStorage, Tensor]]:
        start = 0
        for storage, size in self._kept:
            yield storage, host[start : start + size]
            start += size

    def _host_memory(self, size: int) -> Tensor:
        if self._host is not None and len(self._host) >= size:
            return self._host
        self._host = None
        if (free := free_memory(HOST, 1.0)) < size:
            raise RunnerError(f"sleeping takes {size / GIB:.2f} GiB of host memory, {free / GIB:.2f} GiB are free")
        self._host = torch.empty(size, dtype=torch.uint8)
        if is_gpu(self._device):
            # Touched first, as several threads do that together; locked as it is, as torch would round the size up.
            self._host.fill_(0)
            cudart, address = torch.cuda.cudart(), self._host.data_ptr()  # type: ignore[no-untyped-call]
            code = int(cudart.cudaHostRegister(address, size, 0))
            if code:
                self._host = None
                raise RunnerError(f"{size / GIB:.2f} GiB of host memory cannot be page-locked: CUDA error {code}")
            # Memory that was freed while it was locked could not be locked again when it is allocated again.
            weakref.finalize(self._host, cudart.cudaHostUnregister, address)
        return self._host

    def _wait(self) -> None:
        if is_gpu(self._device):
            wait_for_device()


def device_tensors(owner: object, device_type: str) -> list[Tensor]:
    """All tensors on devices of a type that ``owner`` refers to, directly or through other objects.

    Modules, classes and the globals of functions are not followed: what they hold is not the owner's.
    """
    found: list[Tensor] = []
    seen: dict[int, object] = {}
    todo: list[object] = [owner]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | ModuleType):
            continue
        seen[id(item)] = item  # kept, so that no other object gets its id
        if isinstance(item, Tensor):
            if item.device.type == device_type:
                found.append(item)
        elif isinstance(item, FunctionType):
            todo += [*(item.__closure__ or ()), item.__defaults__]
        else:
            todo += gc.get_referents(item)
    return found


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """By address: views share one. Without those that are empty, or in memory that is not torch's."""
    every = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in every if storage.nbytes() and storage.resizable()}


def _content(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
