"""Copies of single blocks: to host memory and back for the tiers behind the prefix cache, and of a block's beginning.

Each takes place, for the storage, where it is asked for: after the steps that were started and the copies asked for
before it, and before all others. A step that still waits to be started may follow as well: it touches only blocks that
its sequences hold, and those of a sequence that lost them are left out of it.

Blocks come and go by tier in models of one KV group only: these classes read and write blocks of the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.runtime.kv_storage import KVStorage


class StepQueue(NamedTuple):
    """Where steps run: their stream, and a lock that is held by whoever uses it, or captures a graph on it."""

    stream: torch.cuda.Stream
    lock: threading.Lock


class HostBlockCopies:
    """Blocks of a storage that is in host memory already."""

    def __init__(self, storage: KVStorage) -> None:
        self._pool = storage.pools[0]
        self.num_bytes = sum(part[:, :, 0].nbytes for part in self._pool)
        self.copy_slots = storage.copy_slots

    def read(self, block: int) -> Callable[[], bytes]:
        """Copy ``block`` out at once: the next step may write to it."""
        content = _content(self._pool, block).numpy().tobytes()
        return lambda: content

    def write(self, block: int, content: bytes) -> None:
        """Put ``content`` into ``block``."""
        _fill(self._pool, block, torch.frombuffer(bytearray(content), dtype=torch.uint8))


class DeviceBlockCopies:
    """Blocks of a storage on a CUDA device, by way of pinned memory and a stream of their own.

    A copy waits for the steps submitted before it, and the steps submitted after it wait until the block has been read
    or written; the host waits for nothing but the end of a copy out, in the thread that wants its content.
    """

    def __init__(self, storage: KVStorage, steps: StepQueue) -> None:
        self._storage = storage
        self._pool = storage.pools[0]
        self.num_bytes = sum(part[:, :, 0].nbytes for part in self._pool)
        self._steps, self._lock = steps
        self._copies = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]

    def read(self, block: int) -> Callable[[], bytes]:
        """Start to copy ``block`` out; what is returned waits for it."""
        with self._lock, torch.cuda.stream(self._copies):
            self._copies.wait_stream(self._steps)
            content = _content(self._pool, block)
            self._steps.wait_event(self._copies.record_event())
            pinned = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(content, non_blocking=True)
            done = self._copies.record_event()

        def wait() -> bytes:
            done.synchronize()
            return pinned.numpy().tobytes()

        return wait

    def write(self, block: int, content: bytes) -> None:
        """Start to put ``content`` into ``block``."""
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()
        with self._lock, torch.cuda.stream(self._copies):
            on_device = raw.to(self._storage.device, non_blocking=True)
            self._copies.wait_stream(self._steps)
            _fill(self._pool, block, on_device)
            self._steps.wait_event(self._copies.record_event())

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Start ``KVStorage.copy_slots``, on the steps' own stream."""
        with self._lock, torch.cuda.stream(self._steps):
            self._storage.copy_slots(group, source, target, num_tokens)


def _content(pool: list[Tensor], block: int) -> Tensor:
    """A copy of a block in all tensors of a pool, as bytes."""
    return torch.cat([part[:, :, block].contiguous().view(torch.uint8).flatten() for part in pool])


def _fill(pool: list[Tensor], block: int, content: Tensor) -> None:
    """Put bytes that ``_content`` gave into a block."""
    start = 0
    for part in pool:
        place = part[:, :, block]
        raw, start = content[start : start + place.nbytes], start + place.nbytes
        place.copy_(raw.view(place.dtype).view(place.shape))


BlockCopies = HostBlockCopies | DeviceBlockCopies
