"""Copies of single blocks and recurrent states, to and from host memory for the offload tiers of the prefix cache, and
within the storage.

Copies take effect in message order: after the steps and copies sent before them, and before those sent later. What is
read or written is a list of views of the storage: ``KVStorage.block``, ``state`` or ``routes``. What is written may be
any buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.replies import Done
from octavo.steps.messages import (
    CacheCopy,
    CopySlots,
    CopyState,
    ReadBlock,
    ReadRoutes,
    ReadState,
    Reply,
    WriteBlock,
    WriteState,
)

STAGED_BYTES = 96 << 20
"""Most pinned memory with contents on their way to the device; one that is larger is alone."""


class HostBlockCopies:
    """Copies for a ``KVStorage`` that is already in host memory."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage

    def execute(self, message: CacheCopy) -> Reply[Any]:
        """Do what ``message`` says."""
        storage = self._storage
        match message:
            case CopySlots(group, source, target, num_tokens):
                storage.copy_slots(group, source, target, num_tokens)
            case CopyState(source, target):
                storage.copy_state(source, target)
            case ReadBlock(block):
                return self.read(storage.block(block))
            case WriteBlock(block, content):
                self.write(storage.block(block), content)
            case ReadState(slot):
                return self.read(storage.state(slot))
            case WriteState(slot, content):
                self.write(storage.state(slot), content)
            case ReadRoutes(blocks):
                return self.read(storage.routes(blocks))
        return Done(None)

    def read(self, parts: list[Tensor]) -> Reply[memoryview]:
        """Copy ``parts`` out immediately, because the next step may write to them."""
        return Done(_content(parts).numpy().data)

    def write(self, parts: list[Tensor], content: bytes) -> None:
        """Write ``content``, from ``read``, to ``parts``."""
        _fill(parts, _copied(content, torch.empty(len(content), dtype=torch.uint8)))


class DeviceBlockCopies(HostBlockCopies):
    """Copies for a ``KVStorage`` on a CUDA device, through pinned memory on a separate stream.

    A copy waits for the steps sent before it; steps sent after it wait until it has read or written.
    The host waits only in ``BlockContent.wait``, in the thread that calls it, and in ``write`` while much is staged.
    """

    def __init__(self, storage: KVStorage, steps: torch.cuda.Stream) -> None:
        """``steps`` is the stream that steps run on."""
        super().__init__(storage)
        self._steps = steps
        self._copies = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]
        self._staged: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        """Pinned memory with contents that are written, oldest first, and what is recorded when it was read."""

    def execute(self, message: CacheCopy) -> Reply[Any]:
        """Start what ``message`` says; copies within the storage are on the stream of the steps."""
        with torch.cuda.stream(self._steps):
            return super().execute(message)

    def read(self, parts: list[Tensor]) -> BlockContent:
        """Start copying ``parts`` to the host."""
        with torch.cuda.stream(self._copies):
            self._copies.wait_stream(self._steps)
            content = _content(parts)
            self._steps.wait_event(self._copies.record_event())
            pinned = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(content, non_blocking=True)
            return BlockContent(pinned, self._copies.record_event())

    def write(self, parts: list[Tensor], content: bytes) -> None:
        """Start writing ``content`` to ``parts``; waits for earlier ones while ``STAGED_BYTES`` of them are staged."""
        num_staged = sum(pinned.nbytes for pinned, _ in self._staged)
        while self._staged and num_staged + len(content) > STAGED_BYTES:
            earlier, was_read = self._staged.popleft()
            was_read.synchronize()
            num_staged -= earlier.nbytes
            del earlier  # the allocator of pinned memory keeps it for the next
        raw = _copied(content, torch.empty(len(content), dtype=torch.uint8, pin_memory=True))
        with torch.cuda.stream(self._copies):
            on_device = raw.to(self._storage.device, non_blocking=True)
            self._staged.append((raw, self._copies.record_event()))
            self._copies.wait_stream(self._steps)
            _fill(parts, on_device)
            self._steps.wait_event(self._copies.record_event())


class BlockContent:
    """Content that is being copied to the host."""

    def __init__(self, pinned: Tensor, done: torch.cuda.Event) -> None:
        self._pinned, self._done = pinned, done

    def wait(self) -> memoryview:
        """Wait for the copy and return its bytes, of pinned memory; may be called from any thread."""
        self._done.synchronize()
        return self._pinned.numpy().data


def _content(parts: list[Tensor]) -> Tensor:
    """A copy of the data of all parts, as a flat uint8 tensor."""
    content = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=parts[0].device)
    for part, raw in _beside(parts, content):
        raw.copy_(part)
    return content


def _fill(parts: list[Tensor], content: Tensor) -> None:
    """Write bytes returned by ``_content`` to parts of the same sizes."""
    for part, raw in _beside(parts, content):
        part.copy_(raw)


def _beside(parts: list[Tensor], content: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part, and the bytes of ``content`` that are its own, as a tensor of its shape. Where they begin at no
    multiple of an element, both as bytes."""
    start = 0
    for part in parts:
        raw = content[start : start + part.nbytes]
        aligned = part if start % part.itemsize == 0 else part.view(torch.uint8)
        yield aligned, raw.view(aligned.dtype).view(aligned.shape)
        start += part.nbytes


def _copied(content: bytes, target: Tensor) -> Tensor:
    """``target``, a flat uint8 tensor in host memory, with ``content``; torch itself takes no constant buffers."""
    target.numpy()[:] = np.frombuffer(content, np.uint8)
    return target
