"""Copies of blocks and recurrent states, to and from host memory for the offload tiers of the prefix cache, and within
the storage.

Copies take effect in message order: after the steps and copies sent before them, and before those sent later. What is
read or written are places of pools: ``KVStorage.contents``. What is written may be any buffer.

Shapes: A tensors of a pool, N places of it, R elements or W words that a tensor has at a place, n places of a message,
B bytes of a content, which is what all pools have at a place.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.replies import Done
from octavo.steps.messages import CacheCopy, CopySlots, CopyState, ReadPlaces, Reply, WritePlaces

STAGED_BYTES = 96 << 20
"""Most pinned memory that contents are copied to on their way to the device; what is larger is alone."""
WORDS = torch.int64, torch.int32, torch.int16, torch.uint8

Bytes = npt.NDArray[np.uint8]
Place = tuple[Tensor, int, int]
"""Pinned memory, and where in it a content begins and ends."""


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
            case ReadPlaces(pool, places):
                return self.read(storage.contents(pool), places)
            case WritePlaces(pool, places, contents):
                self.write(storage.contents(pool), places, contents)
        return Done(None)

    def read(self, pools_ANR: list[Tensor], places: list[int]) -> Reply[memoryview]:
        """Copy the contents of ``places`` out immediately, because the next step may write to them."""
        contents_nB = np.empty((len(places), _parts(pools_ANR)[-1].stop), np.uint8)
        for own_AR, place_AR in _beside(pools_ANR, places, contents_nB):
            own_AR[:] = place_AR
        return Done(contents_nB.reshape(-1).data)

    def write(self, pools_ANR: list[Tensor], places: list[int], contents: list[bytes]) -> None:
        """Write ``contents``, from ``read``, to ``places``, one each."""
        for own_AR, place_AR in _beside(pools_ANR, places, (np.frombuffer(content, np.uint8) for content in contents)):
            place_AR[:] = own_AR


class DeviceBlockCopies(HostBlockCopies):
    """Copies for a ``KVStorage`` on a CUDA device, through pinned memory on a separate stream.

    A copy waits for the steps sent before it; steps sent after it wait until it has read or written.
    The host waits only in ``BlockContent.wait``, in the thread that calls it, and in ``write`` while much is staged.
    A message takes as much of the device's memory as its contents, and twice that if there are several pools or runs.
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

    def read(self, pools_ANR: list[Tensor], places: list[int]) -> BlockContent:
        """Start copying the contents of ``places`` to the host."""
        with torch.cuda.stream(self._copies):
            self._copies.wait_stream(self._steps)
            content = _gathered(pools_ANR, places)
            self._steps.wait_event(self._copies.record_event())
            pinned = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(content, non_blocking=True)
            return BlockContent(pinned, self._copies.record_event())

    def write(self, pools_ANR: list[Tensor], places: list[int], contents: list[bytes]) -> None:
        """Start writing ``contents`` to ``places``: those in pinned memory from there, others through staged memory."""
        sources = [pinned_place(content) for content in contents]
        others = [content for content, source in zip(contents, sources, strict=True) if source is None]
        staged = self._staged_copy(others)
        ends = list(itertools.accumulate(map(len, others)))
        rest = iter([(staged, end - len(content), end) for content, end in zip(others, ends, strict=True)])
        with torch.cuda.stream(self._copies):
            runs = [
                run.to(self._storage.device, non_blocking=True)
                for run in joined(next(rest) if source is None else source for source in sources)
            ]
            if others:
                self._staged.append((staged, self._copies.record_event()))
            self._copies.wait_stream(self._steps)
            _scatter(pools_ANR, places, runs[0] if len(runs) == 1 else torch.cat(runs))
            self._steps.wait_event(self._copies.record_event())

    def _staged_copy(self, contents: list[bytes]) -> Tensor:
        """``contents`` in pinned memory; waits for earlier ones while ``STAGED_BYTES`` are staged."""
        size = sum(map(len, contents))
        while self._staged and sum(len(earlier) for earlier, _ in self._staged) + size > STAGED_BYTES:
            self._staged.popleft()[1].synchronize()  # the allocator of pinned memory keeps it for the next
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        if contents:
            np.concatenate([np.frombuffer(content, np.uint8) for content in contents], out=staged.numpy())
        return staged


class BlockContent:
    """Contents that are being copied to the host."""

    def __init__(self, pinned: Tensor, done: torch.cuda.Event) -> None:
        self._pinned, self._done = pinned, done

    def wait(self) -> memoryview:
        """Wait for the copy and return its bytes, of pinned memory; may be called from any thread."""
        self._done.synchronize()
        return self._pinned.numpy().data


def pinned_memory(size: int) -> memoryview:
    """Pinned memory for contents, see ``BlockStore``: a whole power of two, as torch allocates no other. Torch keeps it
    for the next as soon as nothing refers to any part of it, since to lock a gigabyte takes half a second."""
    return torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True).numpy().data[:size]


def pinned_place(content: bytes) -> Place | None:
    """Where a buffer is in a pinned tensor of bytes; ``None`` if it is of other memory.

    A copy from the tensor is known to its allocator, which gives the memory to nobody before the copy is over, unlike
    one from another tensor at this address.
    """
    array = memoryview(content).obj
    memory = array.base if isinstance(array, np.ndarray) else None
    if not isinstance(memory, Tensor) or memory.dtype != torch.uint8 or not memory.is_pinned():
        return None
    start = np.frombuffer(content, np.uint8).__array_interface__["data"][0] - memory.data_ptr()
    return memory, start, start + len(content)


def joined(places: Iterable[Place]) -> list[Tensor]:
    """The memory of ``places`` in order; those that follow each other are one tensor."""
    runs: list[Place] = []
    for memory, start, stop in places:
        follows = bool(runs) and runs[-1][0] is memory and runs[-1][2] == start
        runs.append((memory, runs.pop()[1] if follows else start, stop))
    return [memory[start:stop] for memory, start, stop in runs]


def _parts(pools_ANR: list[Tensor]) -> list[slice]:
    """Which bytes of a content are of each pool."""
    ends = list(itertools.accumulate(pool[:, 0].nbytes for pool in pools_ANR))
    return list(map(slice, [0, *ends], ends))


def _beside(pools_ANR: list[Tensor], places: list[int], contents: Iterable[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
    """What each content has of each pool, and its place there, for pools in host memory; both in bytes [A, R]."""
    parts = [(pool.view(torch.uint8).numpy(), part) for pool, part in zip(pools_ANR, _parts(pools_ANR), strict=True)]
    for place, content_B in zip(places, contents, strict=True):
        for pool_ANR, part in parts:
            yield content_B[part].reshape(len(pool_ANR), -1), pool_ANR[:, place]


def _gathered(pools_ANR: list[Tensor], places: list[int]) -> Tensor:
    """The contents of ``places``, one behind the other, on the device of the pools."""
    parts = [rows[index_nA].flatten(1).view(torch.uint8) for rows, index_nA, _ in _rows(pools_ANR, places)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).view(-1)


def _scatter(pools_ANR: list[Tensor], places: list[int], contents: Tensor) -> None:
    """Write what ``_gathered`` returned to as many places."""
    contents_nB = contents.view(len(places), -1)
    for rows, index_nA, own in _rows(pools_ANR, places):
        rows.index_put_((index_nA,), contents_nB[:, own].view(rows.dtype).view(*index_nA.shape, -1))


def _rows(pools_ANR: list[Tensor], places: list[int]) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Of each pool: its rows [A N, W], of the widest words in which its part of a content is aligned, the numbers of
    those of ``places`` [n, A], on its device, and its part of a content."""
    parts, places_n1 = _parts(pools_ANR), torch.tensor(places).unsqueeze(1)
    for pool_ANR, part in zip(pools_ANR, parts, strict=True):
        A, N, R = pool_ANR.shape
        sizes = R * pool_ANR.itemsize, part.start, parts[-1].stop
        word = next(word for word in WORDS if not any(size % word.itemsize for size in sizes))
        index_nA = (places_n1 + torch.arange(A) * N).pin_memory().to(pool_ANR.device, non_blocking=True)
        yield pool_ANR.view(word).flatten(0, 1), index_nA, part
