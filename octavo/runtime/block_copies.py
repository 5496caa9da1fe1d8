"""Copies of single blocks: to host memory and back for the tiers behind the prefix cache, and of a block's beginning.

Each takes place, for the storage, where it is asked for: after the steps that were started and the copies asked for
before it, and before all others. A step that still waits to be started may follow as well: it touches only blocks that
its sequences hold, and those of a sequence that lost them are left out of it.

Shapes: L layers, P parts (keys and values), N blocks, K kv heads, S block size, H head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from octavo.runtime.kv_storage import KVStorage


class StepQueue(NamedTuple):
    """Where steps run: their stream, and a lock that is held by whoever uses it, or captures a graph on it."""

    stream: torch.cuda.Stream
    lock: threading.Lock


class HostBlockCopies:
    """Blocks of a storage that is in host memory already."""

    def __init__(self, storage: KVStorage) -> None:
        self._pool_LPNKSH = storage.pool
        self.num_bytes = storage.pool[:, :, 0].numel() * storage.pool.element_size()
        self.copy_slots = storage.copy_slots
        self.copy_whole_slots = storage.copy_whole_slots

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

    A copy waits for the steps submitted before it, and the steps submitted after it wait until the block has been read
    or written; the host waits for nothing but the end of a copy out, in the thread that wants its content.
    """

    def __init__(self, storage: KVStorage, steps: StepQueue) -> None:
        self._storage = storage
        self._pool_LPNKSH = storage.pool
        self.num_bytes = storage.pool[:, :, 0].numel() * storage.pool.element_size()
        self._steps, self._lock = steps
        self._copies = torch.cuda.Stream(storage.pool.device)  # type: ignore[no-untyped-call]

    def read(self, block: int) -> Callable[[], bytes]:
        """Start to copy ``block`` out; what is returned waits for it."""
        with self._lock, torch.cuda.stream(self._copies):
            self._copies.wait_stream(self._steps)
            place = self._pool_LPNKSH[:, :, block].contiguous()
            self._steps.wait_event(self._copies.record_event())
            pinned = torch.empty(place.shape, dtype=place.dtype, pin_memory=True)
            pinned.copy_(place, non_blocking=True)
            done = self._copies.record_event()

        def content() -> bytes:
            done.synchronize()
            return pinned.view(torch.uint8).numpy().tobytes()

        return content

    def write(self, block: int, content: bytes) -> None:
        """Start to put ``content`` into ``block``."""
        place = self._pool_LPNKSH[:, :, block]
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()
        with self._lock, torch.cuda.stream(self._copies):
            on_device = raw.to(place.device, non_blocking=True)
            self._copies.wait_stream(self._steps)
            place.copy_(on_device.view(place.dtype).view(place.shape))
            self._steps.wait_event(self._copies.record_event())

    def copy_slots(self, source: int, target: int, num_tokens: int) -> None:
        """Start ``KVStorage.copy_slots``, on the steps' own stream."""
        with self._lock, torch.cuda.stream(self._steps):
            self._storage.copy_slots(source, target, num_tokens)

    def copy_whole_slots(self, source: int, target: int, num_tokens: int) -> None:
        """Start ``KVStorage.copy_whole_slots``, on the same stream."""
        with self._lock, torch.cuda.stream(self._steps):
            self._storage.copy_whole_slots(source, target, num_tokens)


BlockCopies = HostBlockCopies | DeviceBlockCopies
