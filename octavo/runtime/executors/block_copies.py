"""Copies of single blocks, to and from host memory for the offload tiers of the prefix cache, of leading slots, and of
recurrent states.

Copies take effect in message order: after the steps and copies sent before them, and before those sent later.

Offloading is supported for models with one KV group only, so these classes read and write blocks of the first group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.runtime.executors.replies import Done
from octavo.runtime.kv_storage import KVStorage


class HostBlockCopies:
    """Block copies for a ``KVStorage`` that is already in host memory."""

    def __init__(self, storage: KVStorage) -> None:
        self._pool = storage.pools[0]
        self.copy_slots = storage.copy_slots
        self.copy_state = storage.copy_state

    def read(self, block: int) -> Done[bytes]:
        """Copy ``block`` out immediately, because the next step may write to it."""
        return Done(_content(self._pool, block).numpy().tobytes())

    def write(self, block: int, content: bytes) -> None:
        """Write ``content``, the bytes of one block, to ``block``."""
        _fill(self._pool, block, torch.frombuffer(bytearray(content), dtype=torch.uint8))


class DeviceBlockCopies:
    """Block copies for a ``KVStorage`` on a CUDA device, through pinned memory on a separate stream.

    A copy waits for the steps sent before it; steps sent after it wait until the block has been read or written.
    The host waits only in ``BlockContent.wait``, in the thread that calls it.
    """

    def __init__(self, storage: KVStorage, steps: torch.cuda.Stream) -> None:
        """``steps`` is the stream that steps run on."""
        self._storage = storage
        self._pool = storage.pools[0]
        self._steps = steps
        self._copies = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]

    def read(self, block: int) -> BlockContent:
        """Start copying ``block`` to the host."""
        with torch.cuda.stream(self._copies):
            self._copies.wait_stream(self._steps)
            content = _content(self._pool, block)
            self._steps.wait_event(self._copies.record_event())
            pinned = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(content, non_blocking=True)
            return BlockContent(pinned, self._copies.record_event())

    def write(self, block: int, content: bytes) -> None:
        """Start writing ``content`` to ``block``."""
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(self._copies):
            on_device = raw.to(self._storage.device, non_blocking=True)
            self._copies.wait_stream(self._steps)
            _fill(self._pool, block, on_device)
            self._steps.wait_event(self._copies.record_event())

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Start ``KVStorage.copy_slots`` on the stream of the steps."""
        with torch.cuda.stream(self._steps):
            self._storage.copy_slots(group, source, target, num_tokens)

    def copy_state(self, source: int, target: int) -> None:
        """Start ``KVStorage.copy_state`` on the stream of the steps."""
        with torch.cuda.stream(self._steps):
            self._storage.copy_state(source, target)


class BlockContent:
    """The content of a block that is being copied to the host."""

    def __init__(self, pinned: Tensor, done: torch.cuda.Event) -> None:
        self._pinned, self._done = pinned, done

    def wait(self) -> bytes:
        """Wait for the copy and return its bytes; may be called from any thread."""
        self._done.synchronize()
        return self._pinned.numpy().tobytes()


def _content(pool: list[Tensor], block: int) -> Tensor:
    """A copy of the block's data in all tensors of a pool, as a flat uint8 tensor."""
    return torch.cat([part[:, :, block].contiguous().view(torch.uint8).flatten() for part in pool])


def _fill(pool: list[Tensor], block: int, content: Tensor) -> None:
    """Write bytes returned by ``_content`` to a block."""
    start = 0
    for part in pool:
        place = part[:, :, block]
        raw, start = content[start : start + place.nbytes], start + place.nbytes
        place.copy_(raw.view(place.dtype).view(place.shape))
