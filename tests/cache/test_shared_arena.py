"""Memory that other processes read: slots never overlap, all come back, and nothing but the right memory is opened."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.system import shared_arena
from octavo.system.shared_arena import ArenaHandle, SharedArena, Slot, opened, read_into
from tests.tiers import nightly


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(shared_arena, "CHUNK_BYTES", 4096)
    made = SharedArena(20_000)
    yield made
    made.close()


def copied(fd: int, offset: int, size: int) -> bytes:
    found = bytearray(size)
    read_into(memoryview(found), fd, offset)
    return bytes(found)


def used_bytes(arena: SharedArena) -> int:
    """Of slots, with their alignment; free ranges are in order, and none touches another."""
    with arena._lock:
        arena._collect()
        ends = [shared_arena.HEADER_BYTES - 1, *itertools.chain(*arena._free)]
        assert all(a < b for a, b in itertools.pairwise(ends)), ends
        assert ends[-1] <= arena._end <= arena._size
        return arena._end - shared_arena.HEADER_BYTES - sum(end - start for start, end in arena._free)


def in_memory(arena: SharedArena) -> int:
    """Bytes that the system keeps for it."""
    return os.fstat(arena.handle.fd).st_blocks * 512


@pytest.mark.parametrize("seed", [*range(5), *(nightly(seed) for seed in range(5, 100))])
def test_slots_do_not_overlap_and_come_back(seed: int, arena: SharedArena) -> None:
    rng = random.Random(seed)
    kept: list[tuple[Slot, bytes]] = []
    num_refused = 0
    for number in range(400):
        if kept and rng.random() < 0.45:
            kept.pop(rng.randrange(len(kept)))
        elif (slot := arena.take(size := rng.choice([1, 64, 500, 500, 3000]))) is None:
            num_refused += 1
        else:
            content = bytes([number % 256]) * size
            slot.view[:] = content
            kept.append((slot, content))
        slot = None
        assert used_bytes(arena) == sum(-(-len(content) // 64) * 64 for _, content in kept) <= 20_000
        with opened(arena.handle) as fd:
            assert fd is not None
            for index in range(len(kept)):
                assert copied(fd, kept[index][0].offset, len(kept[index][1])) == kept[index][1]
    assert num_refused
    kept.clear()
    assert used_bytes(arena) == 0
    assert arena.take(19_968) is not None, "what came back is not one range"


def test_memory_is_taken_as_it_is_needed_and_used_again(arena: SharedArena) -> None:
    for _ in range(50):
        slot = arena.take(3000)
        assert slot is not None
        assert slot.offset == 4096
        del slot
    assert in_memory(arena) == 2 * 4096
    assert arena.take(30_000) is None


def test_there_is_no_room_where_the_system_has_none(arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert arena.take(10) is None
    assert arena.take(10) is not None
    assert used_bytes(arena) == 0


def test_it_cannot_become_shorter(arena: SharedArena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.handle.fd, 0)
    assert fcntl.fcntl(arena.handle.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


READER = """
import sys, msgspec
from octavo.system.shared_arena import ArenaHandle, opened, read_into
handle, offset, size = msgspec.json.decode(sys.argv[1], type=tuple[ArenaHandle, int, int])
found = bytearray(size)
with opened(handle) as fd:
    read_into(memoryview(found), fd, offset)
    sys.stdout.buffer.write(found)
"""


def test_another_process_reads_it(arena: SharedArena) -> None:
    slot = arena.take(5000)
    assert slot is not None
    slot.view[:] = content = os.urandom(5000)
    told = msgspec.json.encode((arena.handle, slot.offset, 5000)).decode()
    assert subprocess.run([sys.executable, "-c", READER, told], capture_output=True, check=True).stdout == content


def test_only_the_right_memory_is_opened(arena: SharedArena, tmp_path: Path) -> None:
    """Where the other end is on another machine or in another container, its numbers are of something else here."""
    (tmp_path / "file").write_bytes(arena.handle.nonce)
    os.mkfifo(tmp_path / "pipe")
    other = SharedArena(100)
    files = [os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path / "pipe", os.O_RDWR)]
    own = os.getpid()
    fd, nonce = arena.handle.fd, arena.handle.nonce
    wrong = [
        *(ArenaHandle(own, one, nonce) for one in (*files, other.handle.fd, -1, 1 << 40)),
        *(ArenaHandle(pid, fd, nonce) for pid in (-1, 0, 1 << 62)),
        *(ArenaHandle(own, fd, what) for what in (b"", nonce[:-1], bytes(32))),
    ]
    before = set(os.listdir("/proc/self/fd"))
    for handle in (*wrong, None):
        with opened(handle) as found:
            assert found is None, handle
    assert set(os.listdir("/proc/self/fd")) == before
    for one in files:
        os.close(one)
    other.close()
    arena.close()
    with opened(arena.handle) as found:
        assert found is None


@pytest.mark.parametrize("offset", [-1, 5000, 1 << 40, 1 << 63, 1 << 70])
def test_nothing_is_read_beyond_it(offset: int) -> None:
    small = SharedArena(100)
    with opened(small.handle) as fd, pytest.raises(OSError, match="it has no 10 bytes at"):
        copied(fd or -1, offset, 10)
    small.close()


def test_descriptors_and_memory_go_with_it() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for end, _ in itertools.product(("closed", "forgotten"), range(3)):
        arena = SharedArena(10_000)
        slot = arena.take(10)
        assert slot is not None
        if end == "closed":
            arena.close()
            slot.view[:] = b"0123456789"  # is still there
        del arena, slot
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_systems_without_it_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="only Linux"):
        SharedArena(100)
