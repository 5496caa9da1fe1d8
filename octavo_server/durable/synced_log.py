"""An append-only log in files: records with checksums, written in groups by a thread.

A record is a frame: the file's mark (4 bytes), the payload's length and the CRC-32 of length and payload (unsigned
little endian), then the payload. Mark and initial CRC are random and in the file's name, so that no content that a
client sent can look like a record when a reader searches for the next one after damage.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import CANCELLATIONS
from octavo.system.private_files import FILE_MODE, make_private_folder

MAX_RECORD_BYTES = 256 << 20
GROUP_SECONDS = 0.002
"""How long records are collected before a group is written."""
_HEADER = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
_NAME = re.compile(r"(\d{12})-([0-9a-f]{16})\.journal")

logger = logging.getLogger("octavo.server")

Encode = Callable[[], bytes]
"""Makes the payload of a record, in the writing thread."""


@dataclass
class Damage:
    """What a reader could not read."""

    records: int = 0
    """Gaps between readable records; the number of records lost in one is unknown."""
    tail_bytes: int = 0
    """Bytes after the last readable record, as a crash leaves them."""


class LogFile:
    """The name of a log file, from which its frames are made and read."""

    def __init__(self, path: Path) -> None:
        """Raises ``ValueError`` for a name that is not a log file's."""
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise ValueError(path.name)
        salt = bytes.fromhex(named[2])
        self.path = path
        self.number = int(named[1])
        self._mark, self._seed = salt[:4], int.from_bytes(salt[4:], "little")

    @classmethod
    def next(cls, folder: Path, number: int) -> LogFile:
        return cls(folder / f"{number:012d}-{secrets.token_hex(8)}.journal")

    def frame(self, payload: bytes) -> bytes:
        """``payload`` as a record."""
        checksum = zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload)), self._seed))
        return _HEADER.pack(self._mark, len(payload), checksum) + payload

    def read(self, damage: Damage) -> Iterator[bytes]:
        """The payloads of all readable records, in order. Raises ``OSError``."""
        with self.path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from self._records(data, damage)

    def _records(self, data: mmap.mmap, damage: Damage) -> Iterator[bytes]:
        position, is_in_gap, last_end = 0, False, 0
        while 0 <= position <= len(data) - _HEADER.size:
            payload = self._at(data, position)
            if payload is None:
                is_in_gap = True
                position = data.find(self._mark, position + 1)
                continue
            damage.records += is_in_gap
            is_in_gap = False
            position = last_end = position + _HEADER.size + len(payload)
            yield payload
        damage.tail_bytes += len(data) - last_end

    def _at(self, data: mmap.mmap, position: int) -> bytes | None:
        """The payload of the record at ``position``; ``None`` if there is none."""
        mark, length, checksum = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size
        if mark != self._mark or length > min(MAX_RECORD_BYTES, len(data) - start):
            return None
        payload = data[start : start + length]
        return payload if zlib.crc32(payload, zlib.crc32(_LENGTH.pack(length), self._seed)) == checksum else None


def log_files(folder: Path) -> list[LogFile]:
    """The log files in ``folder``, oldest first."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(ValueError):
            files.append(LogFile(path))
    return sorted(files, key=lambda file: file.number)


class LogWriter:
    """Writes records in groups: all that arrive while a group is synced become the next group.

    ``append`` and ``roll`` are for the event loop. A write that fails is reported and counted, and its records are
    lost; if they were a snapshot, the older files stay.
    """

    def __init__(self, folder: Path, is_shared: bool = False) -> None:
        """Create the folder if needed. Raises ``OSError``: ``BlockingIOError`` if another process writes there, and it
        is not ``is_shared``. Then ``lock`` must succeed before that process's files are read."""
        make_private_folder(folder, lambda name: _NAME.fullmatch(name) is not None)
        self._folder_descriptor = os.open(folder, os.O_RDONLY)
        self._folder = folder
        self.is_locked = self.lock()
        """Whether no other process writes in the folder."""
        if not self.is_locked and not is_shared:
            os.close(self._folder_descriptor)
            raise BlockingIOError
        self.num_bytes = 0
        """Bytes written to the current file."""
        self.num_failures = 0
        """Groups that could not be written."""
        self.is_incomplete = False
        """Whether records are missing that were not part of a later snapshot."""
        self._files = log_files(folder) if self.is_locked else []
        """What the next snapshot replaces."""
        self.number = max((file.number for file in log_files(folder)), default=0)
        """Of the newest file."""
        self._pending: list[Encode] = []
        self._snapshot: list[Encode] | None = None
        """First records of the next file, if one shall be begun."""
        self._replaced: list[LogFile] = []
        """Files of another writer that this snapshot replaces, too."""
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._is_failing = False
        self._file: LogFile | None = None
        self._descriptor = -1
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def lock(self) -> bool:
        """Claim the folder, unless another process does; returns whether no other process writes there."""
        try:
            fcntl.flock(self._folder_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.is_locked = True
        return True

    def files_of_others(self) -> list[LogFile]:
        """The log files in the folder that no snapshot of this writer replaces."""
        found = log_files(self._folder)
        own = {file.path for file in self._files}  # after that, as the thread may begin a file
        return [file for file in found if file.path not in own]

    def append(self, record: Encode) -> None:
        with self._wake:
            self._pending.append(record)
            self._wake.notify()

    def roll(self, snapshot: list[Encode], replaced: Sequence[LogFile] = ()) -> None:
        """Begin a new file with ``snapshot``, then delete the older files of this writer, and ``replaced``.

        ``snapshot`` must contain everything worth keeping of them, and of what was appended before.
        """
        with self._wake:
            self._snapshot, self._pending = snapshot, []
            self._replaced += replaced
            self.num_bytes = 0
            self._wake.notify()

    async def synced(self) -> None:
        """Wait until all that was appended before is on disk, or failed to be."""
        done = asyncio.get_running_loop().create_future()
        with self._wake:
            self._waiting.append(done)
            self._wake.notify()
        await done

    def close(self) -> None:
        """Write what is pending, and end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._pending or self._waiting or self._is_closing or self._snapshot is not None):
                    self._wake.wait()
            time.sleep(GROUP_SECONDS)
            with self._wake:
                pending, self._pending = self._pending, []
                waiting, self._waiting = self._waiting, []
                snapshot, self._snapshot = self._snapshot, None
                if snapshot is not None:
                    self._files = [*self._files, *self._replaced]
                    self._replaced = []
                is_closing = self._is_closing
            try:
                self._write(snapshot, pending)
            except CANCELLATIONS:
                raise
            except BaseException as error:
                self.num_failures += 1
                self.is_incomplete = True
                if not self._is_failing:
                    self._is_failing = True
                    logger.error("the journal cannot be written; requests go on without it: %s", error)
            else:
                self._is_failing = False
            if waiting:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    waiting[0].get_loop().call_soon_threadsafe(_finish, waiting)
            if is_closing:
                break
        if self._descriptor >= 0:
            os.close(self._descriptor)
        os.close(self._folder_descriptor)

    def _write(self, snapshot: list[Encode] | None, pending: list[Encode]) -> None:
        try:
            if snapshot is not None:
                self._replace_files(snapshot)
        finally:
            if pending:
                self._append_all(pending)

    def _replace_files(self, snapshot: list[Encode]) -> None:
        """Write ``snapshot`` to a new file; once it is on disk, delete the older ones. If that fails, they stay."""
        old, old_file, old_descriptor = self._files, self._file, self._descriptor
        file = self._begin_file()
        try:
            self._append_all(snapshot)
        except BaseException:
            os.close(self._descriptor)
            file.path.unlink(missing_ok=True)
            self._file, self._descriptor = old_file, old_descriptor
            self._files = old
            raise
        if old_descriptor >= 0:
            os.close(old_descriptor)
        self._files = [file]
        for each in old:
            each.path.unlink(missing_ok=True)
        self.is_incomplete = False

    def _begin_file(self) -> LogFile:
        """Write to a new file from now on."""
        self.number += 1
        file = LogFile.next(self._folder, self.number)
        self._files = [*self._files, file]
        descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
        self._file, self._descriptor = file, descriptor
        os.fsync(self._folder_descriptor)
        return file

    def _append_all(self, records: list[Encode]) -> None:
        file = self._file or self._begin_file()
        for first in range(0, len(records), 256):  # so that no large snapshot is in memory at once
            rest = memoryview(b"".join([file.frame(encode()) for encode in records[first : first + 256]]))
            self.num_bytes += len(rest)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        os.fdatasync(self._descriptor)


def _finish(waiting: list[asyncio.Future[None]]) -> None:
    for done in waiting:
        if not done.done():
            done.set_result(None)
