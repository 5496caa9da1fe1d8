"""Copies of single blocks: to host memory and back for the tiers behind the prefix cache, and of a block's beginning.

Each takes place, for the storage, in the order of messages: after the steps and copies that were sent before it, and
before all others.

Blocks come and go by tier in models of one KV group only: these classes read and write blocks of the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.replies import Done


class HostBlockCopies:
    """Blocks of a storage that is in host memory already."""

    def __init__(self, storage: KVStorage) -> None:
        self._pool = storage.pools[0]
        self.copy_slots = storage.copy_slots

    def read(self, block: int) -> Done[bytes]:
        """Copy ``block`` out at once: the next step may write to it."""
        return Done(_content(self._pool, block).numpy().tobytes())

    def write(self, block: int, content: bytes) -> None:
        """Put ``content`` into ``block``."""
        _fill(self._pool, block, torch.frombuffer(bytearray(content), dtype=torch.uint8))


class DeviceBlockCopies:
    """Blocks of a storage on a CUDA device, by way of pinned memory and a stream of their own.

    A copy waits for the steps sent before it, and the steps sent after it wait until the block has been read or
    written; the host waits for nothing but the end of a copy out, in the thread that asks for its content.
    """

    def __init__(self, storage: KVStorage, steps: torch.cuda.Stream) -> None:
        """``steps``: where steps run."""
        self._storage = storage
        self._pool = storage.pools[0]
        self._steps = steps
        self._copies = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]

    def read(self, block: int) -> BlockContent:
        """Start to copy ``block`` out."""
        with torch.cuda.stream(self._copies):
            self._copies.wait_stream(self._steps)
            content = _content(self._pool, block)
            self._steps.wait_event(self._copies.record_event())
            pinned = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(content, non_blocking=True)
            return BlockContent(pinned, self._copies.record_event())

    def write(self, block: int, content: bytes) -> None:
        """Start to put ``content`` into ``block``."""
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(self._copies):
            on_device = raw.to(self._storage.device, non_blocking=True)
            self._copies.wait_stream(self._steps)
            _fill(self._pool, block, on_device)
            self._steps.wait_event(self._copies.record_event())

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Start ``KVStorage.copy_slots``, on the steps' own stream."""
        with torch.cuda.stream(self._steps):
            self._storage.copy_slots(group, source, target, num_tokens)


class BlockContent:
    """A block's content on its way to the host."""

    def __init__(self, pinned: Tensor, done: torch.cuda.Event) -> None:
        self._pinned, self._done = pinned, done

    def wait(self) -> bytes:
        """Wait for the copy, in any thread."""
        self._done.synchronize()
        return self._pinned.numpy().tobytes()


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
