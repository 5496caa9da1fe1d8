"""Memory that other processes of this machine may read: one process takes slots of it, others copy out of them.

It is a file of Linux without a name (a memfd), which grows as it is used. Who may read it are processes that may read
this one's memory anyway, of the same user or of root: they open it by ``/proc/PID/fd/NUMBER``, which a handle tells
them, and know by a random number at its beginning that it is the right one. Where they see other processes, as in
another container or on another machine, there is no such file. They read it by ``preadv``, which writes to their own
memory and fails where there is nothing: unlike a mapping, it cannot end them by a signal.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import hmac
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import msgspec

NAME = "octavo-arena"
SHOWN = f"/memfd:{NAME} (deleted)"
"""What ``/proc`` shows as the file of a memfd."""
CHUNK_BYTES = 64 << 20
"""By which it grows."""
ALIGNMENT = 64
"""Of slots, in bytes: a line of a CPU's cache."""
NONCE_BYTES = 32
HEADER_BYTES = 4096
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""A path that another process named may lead to something else meanwhile, which must not hold up this one."""


class ArenaHandle(msgspec.Struct, array_like=True, frozen=True):
    """Where other processes find an arena."""

    pid: int
    fd: int
    nonce: bytes


class Slot:
    """Memory for one content. That of an arena is given back when nothing refers to the slot any more, so whoever uses
    ``view`` keeps the slot."""

    __slots__ = ("_freed", "offset", "view")

    def __init__(self, view: memoryview, offset: int = -1, freed: deque[tuple[int, int]] | None = None) -> None:
        self.view, self.offset = view, offset
        """Writable bytes, and where they begin in the arena; -1: in none."""
        self._freed = freed

    def __del__(self) -> None:
        if self._freed is not None:
            self._freed.append((self.offset, len(self.view)))  # without a lock, as this may run at any place


class SharedArena:
    """Slots of at most ``capacity`` bytes together, with what their alignment takes; thread-safe."""

    def __init__(self, capacity: int) -> None:
        """Raises ``OSError`` where there can be none."""
        if not hasattr(os, "memfd_create"):
            raise OSError("only Linux has memory with a file descriptor")
        self._size = HEADER_BYTES + capacity
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, fd)
        """Let no process open it by ``handle`` any more; slots stay until they are given back."""
        os.ftruncate(fd, self._size)  # takes no memory
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.posix_fallocate(fd, 0, HEADER_BYTES)
        self._view = memoryview(mmap.mmap(fd, self._size))
        self.handle = ArenaHandle(os.getpid(), fd, os.urandom(NONCE_BYTES))
        self._view[:NONCE_BYTES] = self.handle.nonce
        self._end = HEADER_BYTES
        """Up to which the file has memory."""
        self._free: list[tuple[int, int]] = []
        """Beginnings and ends of ranges before that, in order, none of which touches another."""
        self._freed: deque[tuple[int, int]] = deque()
        """Offsets and sizes of slots given back since."""
        self._lock = threading.Lock()

    def take(self, size: int) -> Slot | None:
        """Memory of ``size`` bytes; ``None`` if there is no room for them. May wait while the system clears some."""
        room = _aligned(size)
        with self._lock:
            self._collect()
            if all(end - start < room for start, end in self._free) and not self._grow(room):
                return None
            index, start, end = next((i, *free) for i, free in enumerate(self._free) if free[1] - free[0] >= room)
            self._free[index : index + 1] = [(start + room, end)] if start + room < end else []
        return Slot(self._view[start : start + size], start, self._freed)

    def _grow(self, room: int) -> bool:
        """Have a free range of so many bytes at the end."""
        has_tail = bool(self._free) and self._free[-1][1] == self._end
        missing = room - (self._free[-1][1] - self._free[-1][0] if has_tail else 0)
        more = min(max(CHUNK_BYTES, missing), self._size - self._end)
        if more < missing:
            return False
        try:
            os.posix_fallocate(self.handle.fd, self._end, more)  # else a write might end the process by a signal
        except OSError:
            return False
        self._end += more
        self._insert(self._end - more, self._end)
        return True

    def _collect(self) -> None:
        while self._freed:
            start, size = self._freed.popleft()
            self._insert(start, start + _aligned(size))

    def _insert(self, start: int, end: int) -> None:
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))


@contextlib.contextmanager
def opened(handle: ArenaHandle | None) -> Iterator[int | None]:
    """A file descriptor of another process's arena, to read it with; ``None`` where this process has no way to it."""
    fd = None if handle is None else _open(handle)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def read_into(memory: memoryview, fd: int, offset: int) -> None:
    """Fill ``memory`` with what an arena has at ``offset``. Raises ``OSError`` where it has less."""
    is_inside = 0 <= offset <= os.fstat(fd).st_size - len(memory)  # for ``preadv``, -1 is where it was before
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done) if is_inside else 0
        if not count:
            raise OSError(f"it has no {len(memory)} bytes at {offset}")
        done += count


def _open(handle: ArenaHandle) -> int | None:
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        if os.readlink(path) != SHOWN:  # merely to open what it is instead may do something
            return None
        fd = os.open(path, FLAGS)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if hmac.compare_digest(os.pread(fd, NONCE_BYTES, 0), handle.nonce):
            return fd
    os.close(fd)
    return None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
