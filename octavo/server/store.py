"""What outlives a request: answers that may be asked for again, files, and batches, in one SQLite database.

Everything belongs to an owner, the name of an API key, and nobody else finds it. Without a folder the database is in
memory, and what it holds ends with the process.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from octavo.errors import ConfigError
from octavo.private_files import make_private_database, make_private_folder
from octavo.server.errors import StorageFull, StorageUnavailable, printable

FILE_NAME = "octavo.sqlite3"
MAX_BYTES = 1 << 30
"""Most bytes that all items have together; more are refused until some are deleted or expire."""

RETRY_SECONDS = 5
"""When to try again what could not be kept."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_age ON items (kind, created);
CREATE INDEX IF NOT EXISTS items_by_creation ON items (created);
"""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoredItem(NamedTuple):
    """What is put in."""

    kind: str
    id: str
    value: bytes


class Row(NamedTuple):
    """What is listed."""

    id: str
    owner: str
    value: bytes


class Store:
    """Values by kind and id. All work is done by one thread of its own, so that the event loop goes on.

    Each method raises ``StorageFull`` or ``StorageUnavailable`` when the database cannot do it; then nothing of it was
    done.
    """

    def __init__(self, folder: Path | None, retention_seconds: float) -> None:
        """Open the database in ``folder``, or make it. Raises ``ConfigError`` when that is not possible."""
        self._retention = retention_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._problem = ""
        """Why the last statement failed; empty if it did not."""
        try:
            self._database, self._size = self._thread.submit(_connect, folder).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"state_dir: {folder} cannot hold the database: {error}") from None

    async def put(self, kind: str, id: str, owner: str, value: bytes) -> None:
        """Keep ``value``; one of the same kind and id is replaced, and keeps its age."""
        await self.put_all(owner, [StoredItem(kind, id, value)])

    async def put_all(self, owner: str, items: Iterable[StoredItem], instead_of: str | None = None) -> None:
        """Keep all of ``items`` or none, in place of all that the owner has of the kind ``instead_of``."""
        await self._do(lambda: self._put_all(owner, items, instead_of))

    async def get(self, kind: str, id: str, owner: str) -> bytes | None:
        """The value, if ``owner`` has it and it is not too old."""
        sql = "SELECT CAST(value AS BLOB) FROM items WHERE kind = ? AND id = ? AND owner = ? AND created >= ?"
        row = await self._do(lambda: self._database.execute(sql, (kind, id, owner, self._oldest())).fetchone())
        return None if row is None else bytes(row[0])

    async def delete(self, kind: str, id: str, owner: str) -> bool:
        """Forget a value; whether there was one."""
        return await self._do(lambda: self._delete(kind, id, owner))

    async def list(self, kind: str, owner: str | None = None) -> list[Row]:
        """All of a kind, newest first; of one owner or of all."""
        sql = (
            "SELECT id, owner, CAST(value AS BLOB) FROM items "
            "WHERE kind = ? AND created >= ? AND (?3 IS NULL OR owner = ?3) ORDER BY created DESC, id"
        )
        rows = await self._do(lambda: self._database.execute(sql, (kind, self._oldest(), owner)).fetchall())
        return [Row(*row) for row in rows]

    def close(self) -> None:
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.OperationalError as error:  # what may pass; a damaged database raises DatabaseError
            if str(error) != self._problem:
                self._problem = str(error)
                logger.error("the database of responses, files and batches: %s", error)
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise StorageFull(
                    "The disk of the state folder is full; try again when there is room.", retry_after=RETRY_SECONDS
                ) from None
            message = "The server cannot keep or look up anything now."
            raise StorageUnavailable(message, retry_after=RETRY_SECONDS) from None
        if self._problem:
            self._problem = ""
            logger.info("the database of responses, files and batches works again")
        return result

    def _oldest(self) -> float:
        return time.time() - self._retention

    def _put_all(self, owner: str, items: Iterable[StoredItem], instead_of: str | None) -> None:
        database = self._database
        with database:  # which commits, or rolls back
            database.execute("BEGIN IMMEDIATE")
            old, now = self._oldest(), time.time()
            size = self._size - _sum(database, "SELECT sum(length(value)) FROM items WHERE created < ?", old)
            database.execute("DELETE FROM items WHERE created < ?", (old,))
            if instead_of is not None:
                size -= _sum(
                    database, "SELECT sum(length(value)) FROM items WHERE kind = ? AND owner = ?", instead_of, owner
                )
                database.execute("DELETE FROM items WHERE kind = ? AND owner = ?", (instead_of, owner))
            for kind, id, value in items:
                size += len(value)
                size -= _sum(database, "SELECT length(value) FROM items WHERE kind = ? AND id = ?", kind, id)
                database.execute(
                    "INSERT INTO items (kind, id, owner, created, value) VALUES (?, ?, ?, ?, ?) "
                    "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value",
                    (kind, id, owner, now, value),
                )
            if size > MAX_BYTES:
                message = f"The server keeps at most {MAX_BYTES} bytes; delete files or responses first."
                raise StorageFull(message, retry_after=RETRY_SECONDS)
        self._size = size

    def _delete(self, kind: str, id: str, owner: str) -> bool:
        database, which = self._database, (kind, id, owner)
        sql = "SELECT length(value) FROM items WHERE kind = ? AND id = ? AND owner = ?"
        row = database.execute(sql, which).fetchone()
        if row is None:
            return False
        database.execute("DELETE FROM items WHERE kind = ? AND id = ? AND owner = ?", which)
        self._size -= row[0]
        return True


def decoded(kind: str, rows: Iterable[Row], value_type: type[T]) -> Iterator[tuple[Row, T]]:
    """Rows with their values decoded; those that cannot be are left out and named in the log."""
    for row in rows:
        try:
            value = msgspec.json.decode(row.value, type=value_type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.error("%s %s cannot be read and is left out: %s", kind, printable(row.id), error)
        else:
            yield row, value


def _connect(folder: Path | None) -> tuple[sqlite3.Connection, int]:
    """The database, and how many bytes all values in it have."""
    place = ":memory:"
    if folder is not None:
        make_private_folder(folder, lambda name: name.startswith(FILE_NAME))
        make_private_database(folder / FILE_NAME)
        place = str(folder / FILE_NAME)
    database = sqlite3.connect(place, isolation_level=None)
    # One name that is not UTF-8 must not make all rows unreadable.
    database.text_factory = lambda text: text.decode(errors="replace")
    # Every transaction is on the disk when it is committed.
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.executescript(_SCHEMA)
    return database, _sum(database, "SELECT sum(length(value)) FROM items")


def _sum(database: sqlite3.Connection, sql: str, *values: object) -> int:
    """The one number that a query finds; 0 if there is none."""
    row = database.execute(sql, values).fetchone()
    return int(row[0] or 0) if row is not None else 0
