"""Copies of single blocks between a device's storage and host memory, for the tiers behind the prefix cache.

Shapes: L layers, P parts (keys and values), N blocks, K kv heads, S block size, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.runtime.kv_storage import KVStorage


class HostBlockCopies:
    """Blocks of a storage that is in host memory already."""

    def __init__(self, storage: KVStorage) -> None:
        self._pool_LPNKSH = storage.pool
        self.num_bytes = storage.pool[:, :, 0].numel() * storage.pool.element_size()

    def read(self, block: int) -> Callable[[], bytes]:
        """Copy ``block`` out at once: the next step may write to it."""
        content = self._pool_LPNKSH[:, :, block].contiguous().view(torch.uint8).numpy().tobytes()
        return lambda: content

    def write(self, block: int, content: bytes) -> None:
        """Put ``content`` into ``block``."""
        place = self._pool_LPNKSH[:, :, block]
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        place.copy_(raw.view(place.dtype).view(place.shape))


class DeviceBlockCopies:
    """Blocks of a storage on a CUDA device, by way of pinned memory and a stream of their own.

    A copy waits for the steps submitted before it, and the steps submitted after it wait for the copy; the host waits
    for nothing but the end of a copy out, in the thread that wants its content. ``stream`` is that of the steps.
    """

    def __init__(self, storage: KVStorage, stream: torch.cuda.Stream) -> None:
        self._pool_LPNKSH = storage.pool
        self.num_bytes = storage.pool[:, :, 0].numel() * storage.pool.element_size()
        self._steps = stream
        self._copies = torch.cuda.Stream(storage.pool.device)  # type: ignore[no-untyped-call]

    def read(self, block: int) -> Callable[[], bytes]:
        """Start to copy ``block`` out; what is returned waits for it."""
        self._copies.wait_stream(self._steps)
        with torch.cuda.stream(self._copies):
            place = self._pool_LPNKSH[:, :, block].contiguous()
            pinned = torch.empty(place.shape, dtype=place.dtype, pin_memory=True)
            pinned.copy_(place, non_blocking=True)
            done = self._copies.record_event()
        self._steps.wait_event(done)

        def content() -> bytes:
            done.synchronize()
            return pinned.view(torch.uint8).numpy().tobytes()

        return content

    def write(self, block: int, content: bytes) -> None:
        """Start to put ``content`` into ``block``."""
        place = self._pool_LPNKSH[:, :, block]
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()
        self._copies.wait_stream(self._steps)
        with torch.cuda.stream(self._copies):
            on_device = raw.to(place.device, non_blocking=True)
            place.copy_(on_device.view(place.dtype).view(place.shape))
            done = self._copies.record_event()
        self._steps.wait_event(done)
