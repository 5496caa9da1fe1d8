"""Device memory that the ranks of an engine map from each other: CUDA IPC, through the driver's own functions.

torch can share tensors, too, but leaves a named file in shared memory when a process is killed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from octavo.ops.collective import Collective
from octavo.ops.device_captures import wait_for_device

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


def mapped_buffers(host: Collective, num_bytes: int, device: torch.device) -> Tensor | None:
    """Where the buffers of all ranks are in this process, int64 [W] on the device; ``None`` if a rank cannot map them.

    The buffers are zeros, and live as long as the process. Every rank must call this at the same time, with the device
    current on which it computes. ``host`` exchanges the handles, and whether all succeeded.
    """
    torch.empty(1, device=device)  # makes torch's context of the device current
    driver = ctypes.CDLL("libcuda.so.1")
    own, handle = ctypes.c_uint64(), Handle()
    _check(driver.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(num_bytes)), "cuMemAlloc")
    _check(driver.cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "cuMemsetD8")
    wait_for_device(device)
    is_shared = driver.cuIpcGetMemHandle(ctypes.byref(handle), own) == 0
    handles = host.all_gather(torch.frombuffer(bytearray(bytes(handle)), dtype=torch.uint8))
    places = [own.value if rank == host.rank else _open(driver, other) for rank, other in enumerate(handles)]
    is_complete = torch.tensor([is_shared and all(places)])
    if not host.all_gather(is_complete).all():  # after this, all buffers are zeros, and mapped everywhere
        return None
    return torch.tensor(places, dtype=torch.int64, device=device)


def _open(driver: Any, handle: Tensor) -> int:
    """The address of another rank's buffer; 0 if it cannot be mapped."""
    place = ctypes.c_uint64()
    other = Handle.from_buffer_copy(handle.numpy().tobytes())
    flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
    status = driver.cuIpcOpenMemHandle_v2(ctypes.byref(place), other, flags)
    return 0 if status else place.value


def _check(status: int, function: str) -> None:
    if status != 0:
        raise RuntimeError(f"{function} failed with CUDA error {status}")
