"""Persistent storage of responses, files and batches in one SQLite database.

Each item belongs to an owner, the name of an API key, and is visible only to that owner. Without a folder the database
is in memory and lost at exit.
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
"""Most bytes of all items in total; further writes fail until items are deleted or expire."""

RETRY_SECONDS = 5
"""``Retry-After`` of a failed operation."""

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
    """An item to store."""

    kind: str
    id: str
    value: bytes


class Row(NamedTuple):
    """A listed item."""

    id: str
    owner: str
    value: bytes


class Store:
    """Values by kind and id. A dedicated thread runs all queries, so that the event loop is not blocked.

    Each method raises ``StorageFull`` or ``StorageUnavailable`` on failure, and has no effect then.
    """

    def __init__(self, folder: Path | None, retention_seconds: float) -> None:
        """Open or create the database in ``folder``. Raises ``ConfigError`` on failure."""
        self._retention = retention_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._problem = ""
        """Error of the last operation, or ""; avoids logging the same error repeatedly."""
        try:
            self._database, self._size = self._thread.submit(_connect, folder).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"state_dir: {folder} cannot hold the database: {error}") from None

    async def put(self, kind: str, id: str, owner: str, value: bytes) -> None:
        """Store ``value``; replaces an item of the same kind and id, whose creation time is kept."""
        await self.put_all(owner, [StoredItem(kind, id, value)])

    async def put_all(self, owner: str, items: Iterable[StoredItem], instead_of: str | None = None) -> None:
        """Store all of ``items`` or none, replacing the owner's items of kind ``instead_of``."""
        await self._do(lambda: self._put_all(owner, items, instead_of))

    async def get(self, kind: str, id: str, owner: str) -> bytes | None:
        """The value, or ``None`` if ``owner`` has no such item or it expired."""
        sql = "SELECT CAST(value AS BLOB) FROM items WHERE kind = ? AND id = ? AND owner = ? AND created >= ?"
        row = await self._do(lambda: self._database.execute(sql, (kind, id, owner, self._oldest())).fetchone())
        return None if row is None else bytes(row[0])

    async def delete(self, kind: str, id: str, owner: str) -> bool:
        """Delete an item; return whether it existed."""
        return await self._do(lambda: self._delete(kind, id, owner))

    async def list(self, kind: str, owner: str | None = None) -> list[Row]:
        """All items of a kind, newest first; of one owner or, with ``None``, of all."""
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
        except sqlite3.OperationalError as error:  # transient errors; a damaged database raises DatabaseError
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
    """Rows with their decoded values; undecodable rows are skipped and logged."""
    for row in rows:
        try:
            value = msgspec.json.decode(row.value, type=value_type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.error("%s %s cannot be read and is left out: %s", kind, printable(row.id), error)
        else:
            yield row, value


def _connect(folder: Path | None) -> tuple[sqlite3.Connection, int]:
    """The open database, and the total size of its values in bytes."""
    place = ":memory:"
    if folder is not None:
        make_private_folder(folder, lambda name: name.startswith(FILE_NAME))
        make_private_database(folder / FILE_NAME)
        place = str(folder / FILE_NAME)
    database = sqlite3.connect(place, isolation_level=None)
    # A name that is not valid UTF-8 must not make all rows unreadable.
    database.text_factory = lambda text: text.decode(errors="replace")
    # Every committed transaction is durable.
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.executescript(_SCHEMA)
    return database, _sum(database, "SELECT sum(length(value)) FROM items")


def _sum(database: sqlite3.Connection, sql: str, *values: object) -> int:
    """The single number that a query returns; 0 if none."""
    row = database.execute(sql, values).fetchone()
    return int(row[0] or 0) if row is not None else 0
