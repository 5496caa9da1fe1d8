"""Storage tiers for the contents of evicted blocks: host memory, then disk.

A tier is an LRU key-value store. A key identifies a prefix and everything that its keys and values depend on, so the
content of a key never changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
import struct
import threading
import time
import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from octavo.errors import ConfigError
from octavo.system.private_files import (
    FILE_MODE,
    FOLDER_MODE,
    make_private,
    make_private_database,
    make_private_folder,
    write_private,
)

Content = bytes | memoryview
"""Of single bytes."""

CHECKSUM_BYTES = 16
FORMAT = b"crc32, blake2b"
"""Of the files: one of another format has another name, so that it is not looked for. At most 16 bytes."""
LEAST_TELLING_BYTES = 64 << 20
"""Of fewer bytes, latencies are most of the time; they are always read."""
GROWTH_OF_RATE = 1.1
REFRESH_SECONDS = 0.1
"""A server that takes over is asked as soon as the other has ended, which wrote until then."""
WAIT_SECONDS = 5.0
"""For another process that writes to the index."""
KEY_BYTES = 32
MAX_PATHS = 1024
INDEX = "index.sqlite"
KEEP_LAST_ROW = """
INSERT OR REPLACE INTO blocks SELECT x'', -1 FROM blocks WHERE key = ? AND rowid = (SELECT max(rowid) FROM blocks)
"""
"""Before a key's row is deleted: if it is the last, add one of no block, as SQLite gives the id after the largest, and
other processes look for ids above the last that they know."""
_PART = re.compile("[0-9a-f]{2}")
"""Name of a subfolder: the first two hex digits of the names of its files."""


class CopyRate:
    """Bytes per second that are read of a tier, or written to the device, as measured, so that nothing is copied which
    is computed sooner."""

    def __init__(self) -> None:
        self._per_second: float | None = None

    def learn(self, num_bytes: int, seconds: float) -> None:
        """So many bytes were copied together; few tell nothing."""
        if num_bytes >= LEAST_TELLING_BYTES:
            self._per_second = num_bytes / seconds

    def learn_at_least(self, num_bytes: int, seconds: float) -> None:
        """So many bytes were copied together, in a time that may include waiting for something else."""
        if num_bytes >= LEAST_TELLING_BYTES:
            self._per_second = max(self._per_second or 0.0, num_bytes / seconds)

    def seconds(self, num_bytes: int) -> float:
        """What so many bytes are expected to take: nothing if they are few, or before any measurement."""
        known = self._per_second
        return 0.0 if known is None or num_bytes < LEAST_TELLING_BYTES else num_bytes / known

    def grow(self) -> None:
        """Take the rate to be a little higher, as nothing is copied that would measure it: it is measured again some
        time, and other files may be read faster."""
        if self._per_second is not None:
            self._per_second *= GROWTH_OF_RATE


@dataclass
class OffloadStats:
    """Counts of blocks, and of recurrent states."""

    num_saved: int = 0
    num_dropped: int = 0
    """Those evicted while too many were pending."""
    num_prefetched: int = 0
    num_restored: int = 0
    num_received: int = 0
    """Those fetched from prefill servers."""
    num_failures: int = 0
    """Prompts that a prefill server should have had, and that nothing was fetched of, or not all."""


class HostTier:
    """Host memory, at most ``capacity`` bytes; thread-safe, as the other tier is.

    A buffer of which a content is a part stays as long as any of its parts; all buffers have at most twice as much.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = self._buffer_bytes = 0
        self._num_parts = Counter[int]()
        """Contents of each buffer, by its identity."""
        self._contents: OrderedDict[bytes, Content] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._contents

    def touch(self, path: list[bytes]) -> None:
        """Let those of a prefix's keys that are here be given up last, and the end of the prefix before its beginning:
        without that the rest is of no use."""
        with self._lock:
            for key in reversed(path):
                if key in self._contents:
                    self._contents.move_to_end(key)

    def get(self, key: bytes) -> Content | None:
        """The content as it was put; ``None`` if it is missing."""
        with self._lock:
            content = self._contents.get(key)
            if content is not None:
                self._contents.move_to_end(key)
            return content

    def put(self, key: bytes, content: Content) -> None:
        """Store ``content``, in place of those that were used longest ago."""
        with self._lock:
            if key in self._contents:
                self._contents.move_to_end(key)
                return
            self._contents[key] = content
            self._count(content, 1)
            while self.num_bytes > self.capacity or self._buffer_bytes > 2 * self.capacity:
                self._count(self._contents.popitem(last=False)[1], -1)

    def _count(self, content: Content, change: int) -> None:
        """One content more or less is kept."""
        buffer = cast(bytes, memoryview(content).obj)
        self._num_parts[id(buffer)] += change
        if self._num_parts[id(buffer)] == max(change, 0):  # the first, or the last
            self._buffer_bytes += change * memoryview(buffer).nbytes
        if not self._num_parts[id(buffer)]:
            del self._num_parts[id(buffer)]
        self.num_bytes += change * len(content)


class DiskTier:
    """Files on disk, at most ``capacity`` bytes, kept across restarts, and shared by all processes with this folder.

    Each content is one file, preceded by a checksum over key and content. The index of keys is an SQLite table. Index
    and files need not agree: a file without an entry is never read, and an entry without a valid file is a miss. So
    nothing has to be synced, and any failure only costs recomputation. All files, including those of earlier versions,
    are readable by the owner only. Several threads may read and write files at a time, each a key of its own. Raises
    ``ConfigError`` if ``folder`` cannot be used.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.capacity = capacity
        self.num_bad = 0
        """Files that were missing, damaged, or could not be written or read."""
        self._writing = threading.Lock()
        """Held while the index is written, which may wait for another process with it; taken before ``_lock``."""
        self._lock = threading.Lock()
        """Held for moments only: the engine's thread takes it."""
        try:
            make_private_folder(folder, _is_own)
            _make_parts_private(folder)
            self._index = _open_index(folder / INDEX)
            self._known = _connect(folder / INDEX, wait_seconds=0)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"kv_offload_dir: {folder} cannot be used: {error}") from None
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bad: set[bytes] = set()
        """Names of files that are missing or damaged: readers don't wait for the index, so writers remove them."""
        self.num_bytes = 0
        self._last_row = 0
        self._next_refresh = 0.0
        self.refresh()

    def __contains__(self, key: bytes) -> bool:
        return _name_of(key) in self._sizes

    def get(self, key: bytes) -> Content | None:
        name = _name_of(key)
        if name not in self._sizes:
            return None
        try:
            stored = memoryview(self._path(name).read_bytes())
        except OSError:
            stored = memoryview(b"")
        content = stored[CHECKSUM_BYTES:]
        is_valid = stored[:CHECKSUM_BYTES] == checksum(key, content)
        with self._lock:
            if name not in self._sizes:
                return None  # it was given up meanwhile
            if not is_valid:
                self.num_bytes -= self._sizes.pop(name)
                self.num_bad += 1
                self._bad.add(name)
                return None
            self._sizes.move_to_end(name)
            return content

    def put(self, key: bytes, content: Content) -> None:
        name = _name_of(key)
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return
        path = self._path(name)
        written = path.with_suffix(".part")
        try:
            path.parent.mkdir(FOLDER_MODE, exist_ok=True)
            write_private(written, checksum(key, content), content)
            with self._writing:
                self._remove_bad()  # which may be this one's earlier file
                written = written.replace(path)  # before the entry, which another process would find to be bad
                self._index.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", (name, len(content)))
                with self._lock:
                    self.num_bytes += len(content) - self._sizes.get(name, 0)  # another process may have written it
                    self._sizes[name] = len(content)
                while (oldest := self._pop_beyond_capacity()) is not None:
                    self._remove(oldest)
        except (OSError, sqlite3.Error):
            with self._lock:
                self.num_bad += 1
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)

    def put_path(self, owner: bytes, name: bytes, keys: list[bytes]) -> None:
        """Note ``keys``, those of a prefix in order, under a name; without any, forget what was noted.

        Beyond ``MAX_PATHS``, the owner of the most loses the one that was put first.
        """
        with self._writing, contextlib.suppress(sqlite3.Error):
            self._index.execute("DELETE FROM session_paths WHERE name = ?", (name,))
            if not keys:
                return
            self._index.execute("INSERT INTO session_paths VALUES (?, ?, ?)", (name, owner, b"".join(keys)))
            [(count,)] = self._index.execute("SELECT count(*) FROM session_paths")
            if count > MAX_PATHS:
                largest = "SELECT owner FROM session_paths GROUP BY owner ORDER BY count(*) DESC LIMIT 1"
                first = f"SELECT min(rowid) FROM session_paths WHERE owner = ({largest})"
                self._index.execute(f"DELETE FROM session_paths WHERE rowid = ({first})")

    def path(self, name: bytes) -> list[bytes]:
        """The keys that were put last under a name, also by another process; none if it is not known."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            for (joined,) in self._known.execute("SELECT keys FROM session_paths WHERE name = ?", (name,)):
                return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
        return []

    def refresh(self) -> None:
        """Learn of what other processes with this folder have stored, at most once in ``REFRESH_SECONDS``."""
        if (now := time.monotonic()) < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_SECONDS
        is_valid = "typeof(key) = 'blob' AND typeof(size) = 'integer' AND size BETWEEN 0 AND ?"  # any type is stored
        select = f"SELECT rowid, key, size FROM blocks WHERE rowid > ? AND {is_valid} ORDER BY rowid"
        with self._lock, contextlib.suppress(sqlite3.Error):
            for row, name, size in self._known.execute(select, (self._last_row, self.capacity)):
                self._last_row = row
                if name not in self._sizes:
                    self._sizes[name] = size
                    self.num_bytes += size

    def close(self) -> None:
        """Close the index; the tier must not be used afterwards."""
        with self._writing:
            self._remove_bad()
            with self._lock:
                self._known.close()
                self._index.close()

    def _path(self, name: bytes) -> Path:
        return self.folder / name.hex()[:2] / name.hex()

    def _pop_beyond_capacity(self) -> bytes | None:
        with self._lock:
            if self.num_bytes <= self.capacity:
                return None
            name, size = self._sizes.popitem(last=False)
            self.num_bytes -= size
            return name

    def _remove_bad(self) -> None:
        """Remove the files that readers found to be bad; the caller holds ``_writing``."""
        while self._bad:
            self._remove(self._bad.pop())

    def _remove(self, name: bytes) -> None:
        """Remove a file and its entry; the caller holds ``_writing``."""
        try:
            self._path(name).unlink(missing_ok=True)
            self._index.execute(KEEP_LAST_ROW, (name,))
            self._index.execute("DELETE FROM blocks WHERE key = ?", (name,))
        except (OSError, sqlite3.Error):
            with self._lock:
                self.num_bad += 1


def _name_of(key: bytes) -> bytes:
    """The name of a content's file, and its key in the index."""
    return hashlib.blake2b(key, digest_size=KEY_BYTES, person=FORMAT).digest()


def checksum(key: bytes, content: Content) -> bytes:
    """The checksum before a content in its file; keyed, so that one key's file is not valid for another.

    A CRC-32 takes less than half of the time of a cryptographic hash of the standard library. Damage is what it is to
    find: who can write to a folder of the owner's alone could write a hash, too.
    """
    found = struct.pack("<QI", len(content), zlib.crc32(content))
    return hashlib.blake2b(found, digest_size=CHECKSUM_BYTES, key=key).digest()


def _is_own(name: str) -> bool:
    return name.startswith(INDEX) or _PART.fullmatch(name) is not None


def _make_parts_private(folder: Path) -> None:
    """Restrict the files and subfolders to their owner. The files of a private subfolder are private already."""
    for part in folder.iterdir():
        if _PART.fullmatch(part.name) and part.is_dir() and part.stat().st_mode & ~FOLDER_MODE & 0o777:
            for file in part.iterdir():
                make_private(file, FILE_MODE)
            make_private(part, FOLDER_MODE)


def _connect(path: Path, wait_seconds: float) -> sqlite3.Connection:
    """A connection that waits so long for other processes with the index."""
    return sqlite3.connect(path, timeout=wait_seconds, check_same_thread=False, isolation_level=None)


def _open_index(path: Path) -> sqlite3.Connection:
    """The index of a folder; a damaged one is replaced by an empty one, so that its files are never read again."""
    for _ in range(2):
        make_private_database(path)
        connection = _connect(path, wait_seconds=WAIT_SECONDS)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, size INTEGER NOT NULL)")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS session_paths (name BLOB PRIMARY KEY, owner BLOB, keys BLOB NOT NULL)"
            )
            connection.execute("SELECT count(size) FROM blocks").fetchone()
            return connection
        except sqlite3.DatabaseError:
            connection.close()
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
    raise sqlite3.DatabaseError("the index cannot be made")
