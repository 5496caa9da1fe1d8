"""What outlives a request: answers that may be asked for again, files, and batches, in one SQLite database.

Everything belongs to an owner, the name of an API key, and nobody else finds it. Without a folder the database is in
memory, and what it holds ends with the process.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from octavo.errors import ConfigError, RequestTooLarge

FILE_NAME = "octavo.sqlite3"
MAX_BYTES = 1 << 30
"""Most bytes that all items have together; more are refused until some are deleted or expire."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_age ON items (kind, created);
"""

T = TypeVar("T")


class Store:
    """Values by kind and id. All work is done by one thread of its own, so that the event loop goes on."""

    def __init__(self, folder: Path | None, retention_seconds: float) -> None:
        """Open the database in ``folder``, or make it. Raises ``ConfigError`` when that is not possible."""
        self._retention = retention_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            self._database = self._thread.submit(_connect, folder).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"state_dir: {folder} cannot hold the database: {error}") from None

    async def put(self, kind: str, id: str, owner: str, value: bytes) -> None:
        """Keep ``value``; one of the same kind and id is replaced, and keeps its age.

        Raises ``RequestTooLarge`` when there is no room.
        """
        await self._do(lambda: self._put(kind, id, owner, value))

    async def get(self, kind: str, id: str, owner: str) -> bytes | None:
        """The value, if ``owner`` has it and it is not too old."""
        sql = "SELECT value FROM items WHERE kind = ? AND id = ? AND owner = ? AND created >= ?"
        row = await self._do(lambda: self._database.execute(sql, (kind, id, owner, self._oldest())).fetchone())
        return None if row is None else bytes(row[0])

    async def delete(self, kind: str, id: str, owner: str) -> bool:
        """Forget a value; whether there was one."""
        sql = "DELETE FROM items WHERE kind = ? AND id = ? AND owner = ?"
        return await self._do(lambda: self._database.execute(sql, (kind, id, owner)).rowcount) > 0

    async def list(self, kind: str, owner: str | None = None) -> list[tuple[str, str, bytes]]:
        """Id, owner and value of all of a kind, newest first; of one owner or of everybody."""
        sql = (
            "SELECT id, owner, value FROM items WHERE kind = ? AND created >= ? AND (?3 IS NULL OR owner = ?3) "
            "ORDER BY created DESC, id"
        )
        rows = await self._do(lambda: self._database.execute(sql, (kind, self._oldest(), owner)).fetchall())
        return [(row[0], row[1], bytes(row[2])) for row in rows]

    def close(self) -> None:
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _oldest(self) -> float:
        return time.time() - self._retention

    def _put(self, kind: str, id: str, owner: str, value: bytes) -> None:
        database = self._database
        database.execute("DELETE FROM items WHERE created < ?", (self._oldest(),))
        (size,) = database.execute("SELECT coalesce(sum(length(value)), 0) FROM items").fetchone()
        if size + len(value) > MAX_BYTES:
            raise RequestTooLarge(f"The server keeps at most {MAX_BYTES} bytes; delete files or responses first.")
        sql = (
            "INSERT INTO items (kind, id, owner, created, value) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value"
        )
        database.execute(sql, (kind, id, owner, time.time(), value))


def _connect(folder: Path | None) -> sqlite3.Connection:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    place = ":memory:" if folder is None else str(folder / FILE_NAME)
    database = sqlite3.connect(place, isolation_level=None)
    # Every statement is a transaction of its own and on the disk when it returns.
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.executescript(_SCHEMA)
    return database
