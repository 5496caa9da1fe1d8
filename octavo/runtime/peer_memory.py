"""Device memory that the ranks of an engine map from each other: CUDA IPC, through the driver's own functions.

torch can share tensors, too, but leaves a named file in shared memory when a process is killed.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from octavo.ops.collective import Collective

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class PeerMemory:
    """A buffer of this rank, and those of the others mapped into this process, for as long as it lives.

    Every rank must make its own at the same time, with the device current on which it computes. ``host`` exchanges
    the handles.
    """

    def __init__(self, host: Collective, num_bytes: int, device: torch.device) -> None:
        torch.empty(1, device=device)  # makes torch's context of the device current
        driver = ctypes.CDLL("libcuda.so.1")
        own, handle = ctypes.c_uint64(), Handle()
        _check(driver.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(num_bytes)), "cuMemAlloc")
        _check(driver.cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "cuMemsetD8")
        torch.cuda.synchronize(device)
        _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), own), "cuIpcGetMemHandle")
        handles = host.all_gather(torch.frombuffer(bytearray(bytes(handle)), dtype=torch.uint8))
        places = []
        for rank, other in enumerate(handles):
            place = own if rank == host.rank else _open(driver, other)
            places.append(place.value)
        host.all_gather(torch.zeros(1))  # all buffers are zeros, and mapped everywhere
        self.addresses_W = torch.tensor(places, dtype=torch.int64, device=device)


def _open(driver: Any, handle: Tensor) -> ctypes.c_uint64:
    place = ctypes.c_uint64()
    other = Handle.from_buffer_copy(handle.numpy().tobytes())
    flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
    _check(driver.cuIpcOpenMemHandle_v2(ctypes.byref(place), other, flags), "cuIpcOpenMemHandle")
    return place


def _check(status: int, function: str) -> None:
    if status != 0:
        raise RuntimeError(f"{function} failed with CUDA error {status}; ranks need GPUs with peer access")


def device_collective(host: Collective, device: torch.device) -> Collective:
    """The collective of a rank's device, given that of the hosts."""
    if host.size == 1 or device.type == "cpu":
        return host
    from octavo.ops.triton.collective import PeerCollective, buffer_bytes  # Triton may be absent without CUDA

    memory = PeerMemory(host, buffer_bytes(host.size), device)
    return PeerCollective(memory.addresses_W, host.rank)


def visible_gpus() -> list[str]:
    """The GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(index) for index in range(torch.cuda.device_count())]
