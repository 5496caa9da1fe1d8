"""Persistent storage of responses, conversations, files and batches in one SQLite database.

Each item belongs to an owner, the name of an API key, and is visible only to that owner. Without a folder the database
is a private temporary file that has no name, and is lost at exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import msgspec

from octavo.errors import CANCELLATIONS, ConfigError
from octavo.system.private_files import make_private_database, make_private_folder
from octavo_server.http.error_responses import StorageFull, StorageUnavailable, Unreadable, printable
from octavo_server.tenants.api_keys import share_of
from octavo_server.tenants.turn_queue import Places

FILE_NAME = "octavo.sqlite3"
MAX_BYTES = 1 << 30
"""Of all items together, as long as one owner has them; beyond, each owner may have this divided by their number.
Further writes fail until items are deleted or expire."""

RETRY_SECONDS = 5
"""``Retry-After`` of a failed operation."""
TIDY_SECONDS = 60
"""Pause between two passes that delete what has expired."""
TIDY_ITEMS = 64
TIDY_PAGES = 1024
"""Items deleted, and pages given back to the disk, while other operations wait."""
MAX_UNUSED = 4
"""One of this many pages of the file may be unused before it is made smaller."""
WAL_BYTES = 64 << 20
"""Largest size that the write-ahead log keeps after it was larger."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
DROP INDEX IF EXISTS items_by_age;
CREATE INDEX IF NOT EXISTS items_by_owner ON items (kind, owner, created);
CREATE INDEX IF NOT EXISTS items_by_creation ON items (created);
"""
_SIZES = """
CREATE TABLE sizes (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO sizes SELECT owner, sum(length(value)) FROM items GROUP BY owner;
CREATE TRIGGER size_added AFTER INSERT ON items BEGIN
    INSERT INTO sizes VALUES (new.owner, length(new.value))
    ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes; END;
CREATE TRIGGER size_removed AFTER DELETE ON items
    BEGIN UPDATE sizes SET bytes = bytes - length(old.value) WHERE owner = old.owner; END;
CREATE TRIGGER size_changed AFTER UPDATE ON items
    BEGIN UPDATE sizes SET bytes = bytes + length(new.value) - length(old.value) WHERE owner = old.owner; END;
"""
"""The size of each owner's values, which triggers keep, so that no write has to sum."""
_GET = "SELECT CAST(value AS BLOB) FROM items WHERE kind = ? AND id = ? AND owner = ? AND created >= ?"

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoredItem(NamedTuple):
    """An item to store."""

    kind: str
    id: str
    value: bytes


class ListedItem(NamedTuple):
    """A listed item."""

    id: str
    owner: str
    value: bytes


class _Write:
    """A change that waits for its commit."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()


class Store:
    """Values by kind and id. A dedicated thread runs all queries, so that the event loop is not blocked.

    Writes that wait while another is synced to disk are committed together. Each method raises ``StorageFull`` or
    ``StorageUnavailable`` on failure, and has no effect then.
    """

    def __init__(self, folder: Path | None, retention_seconds: float) -> None:
        """Open or create the database in ``folder``. Raises ``ConfigError`` on failure."""
        self._retention = retention_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._writes: SimpleQueue[_Write] = SimpleQueue()
        self._large = Places(1)
        """For writes of many bytes: others wait for one of them, not for all."""
        self._problem = ""
        """Error of the last operation, or ""; avoids logging the same error repeatedly."""
        try:
            self._database = self._thread.submit(connect, folder).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"state_dir: {folder} cannot hold the database: {error}") from None

    async def put(self, kind: str, id: str, owner: str, value: bytes) -> None:
        """Store ``value``; replaces an item of the same kind and id, whose creation time is kept."""
        await self.put_all(owner, [StoredItem(kind, id, value)])

    async def put_all(
        self, owner: str, items: Iterable[StoredItem], instead_of: str | None = None, is_large: bool = False
    ) -> None:
        """Store all of ``items`` or none, replacing the owner's items of kind ``instead_of``.

        ``items`` is iterated in the thread, maybe more than once.
        """
        async with self._large.place(owner) if is_large else contextlib.nullcontext():
            await self._write(lambda: self._put_all(owner, items, instead_of))

    async def update(
        self, kind: str, id: str, owner: str, change: Callable[[bytes], bytes], also: Iterable[StoredItem] = ()
    ) -> bytes | None:
        """Replace a value by what ``change`` makes of it, and store ``also``, both or none; returns the new value.

        ``None`` if ``owner`` has no such item or it expired; ``also`` is stored then. ``change`` is called in the
        thread, maybe more than once; nothing is stored if it raises.
        """
        further = list(also)

        def work() -> bytes | None:
            found = self._database.execute(_GET, (kind, id, owner, self._oldest())).fetchone()
            value = None if found is None else change(bytes(found[0]))
            changed = [] if value is None else [StoredItem(kind, id, value)]
            self._put_all(owner, [*changed, *further], None)
            return value

        return await self._write(work)

    async def get(self, kind: str, id: str, owner: str) -> bytes | None:
        """The value, or ``None`` if ``owner`` has no such item or it expired."""
        row = await self._read(_GET, kind, id, owner, self._oldest())
        return bytes(row[0][0]) if row else None

    async def ids(self, kind: str, owner: str) -> Sequence[str]:
        """The ids of an owner's items of a kind, oldest first."""
        sql = "SELECT id FROM items WHERE kind = ? AND owner = ? AND created >= ? ORDER BY created, id"
        return [row[0] for row in await self._read(sql, kind, owner, self._oldest())]

    async def delete(self, kind: str, id: str, owner: str) -> bool:
        """Delete an item; return whether it existed."""
        sql = "DELETE FROM items WHERE kind = ? AND id = ? AND owner = ?"
        return await self._write(lambda: self._database.execute(sql, (kind, id, owner)).rowcount > 0)

    async def list(self, kind: str, owner: str | None = None) -> list[ListedItem]:
        """All items of a kind, newest first; of one owner or, with ``None``, of all."""
        sql = (
            "SELECT id, owner, CAST(value AS BLOB) FROM items "
            f"WHERE kind = ? AND created >= ? {'' if owner is None else 'AND owner = ?'} ORDER BY created DESC, id"
        )
        values = (kind, self._oldest()) if owner is None else (kind, self._oldest(), owner)
        return [ListedItem(*row) for row in await self._read(sql, *values)]

    async def keep_tidy(self) -> None:
        """Delete what expires and give unused room back to the disk, in small steps, until cancelled."""
        while True:
            with contextlib.suppress(StorageUnavailable):  # which was logged
                await self.tidy()
            await asyncio.sleep(TIDY_SECONDS)

    async def tidy(self) -> None:
        """One pass of ``keep_tidy``."""
        while await self._write(lambda: self._delete_expired(TIDY_ITEMS)):
            pass
        while await self._write(self._shrink):
            pass

    def close(self) -> None:
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        return await self._result(self._thread.submit(lambda: self._database.execute(sql, values).fetchall()))

    async def _write(self, work: Callable[[], T]) -> T:
        """Run ``work``, which may run twice, and commit."""
        write = _Write(work)
        self._writes.put(write)
        self._thread.submit(self._commit_waiting)
        result: T = await self._result(write.future)
        return result

    async def _result(self, future: Future[T]) -> T:
        try:
            result = await asyncio.wrap_future(future)
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

    # --- in the thread ---

    def _commit_waiting(self) -> None:
        writes = []
        while not self._writes.empty():
            write = self._writes.get()
            if write.future.set_running_or_notify_cancel():
                writes.append(write)
        if writes:
            self._commit(writes)

    def _commit(self, writes: Sequence[_Write]) -> None:
        """Run ``writes`` in one transaction, or each in its own if one of them fails."""
        try:
            with self._database as database:  # which commits, or rolls back
                database.execute("BEGIN IMMEDIATE")
                results = [write.work() for write in writes]
        except CANCELLATIONS:
            raise
        except BaseException as error:
            if len(writes) == 1:
                writes[0].future.set_exception(error)
                return
            for write in writes:
                self._commit([write])
        else:
            for write, result in zip(writes, results, strict=True):
                write.future.set_result(result)

    def _put_all(self, owner: str, items: Iterable[StoredItem], instead_of: str | None) -> None:
        database, now = self._database, time.time()
        if instead_of is not None:
            database.execute("DELETE FROM items WHERE kind = ? AND owner = ?", (instead_of, owner))
        for kind, id, value in items:
            database.execute(
                "INSERT INTO items (kind, id, owner, created, value) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value",
                (kind, id, owner, now, value),
            )
        while (share := self._exceeded_share(owner)) is not None:
            if not self._delete_expired(TIDY_ITEMS):
                message = f"The server keeps at most {share} bytes for this API key; delete files or responses first."
                raise StorageFull(message, retry_after=RETRY_SECONDS)

    def _exceeded_share(self, owner: str) -> int | None:
        """The owner's share of ``MAX_BYTES``, if it and all items together have more."""
        sql = "SELECT sum(bytes), sum(bytes > 0), sum(CASE WHEN owner = ? THEN bytes ELSE 0 END) FROM sizes"
        total, num_owners, own = self._database.execute(sql, (owner,)).fetchone()
        share = share_of(MAX_BYTES, num_owners or 1)
        return share if (total or 0) > MAX_BYTES and own > share else None

    def _delete_expired(self, limit: int) -> bool:
        """Delete the oldest expired items; return whether there were any."""
        which = "SELECT kind, id FROM items WHERE created < ? ORDER BY created LIMIT ?"
        sql = f"DELETE FROM items WHERE (kind, id) IN ({which})"
        return self._database.execute(sql, (self._oldest(), limit)).rowcount > 0

    def _shrink(self) -> bool:
        """Make the file smaller if much of it is unused; return whether it became smaller."""
        unused, total = self._number("PRAGMA freelist_count"), self._number("PRAGMA page_count")
        if unused * MAX_UNUSED <= total:
            return False
        self._database.execute(f"PRAGMA incremental_vacuum({TIDY_PAGES})").fetchall()
        return self._number("PRAGMA freelist_count") < unused

    def _number(self, sql: str) -> int:
        return int(self._database.execute(sql).fetchone()[0])


def decode(kind: str, id: str, value: bytes, value_type: type[T]) -> T:
    """A decoded value. Raises ``Unreadable``, which is logged with the id."""
    try:
        return msgspec.json.decode(value, type=value_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.error("%s %s cannot be read: %s", kind, printable(id), error)
        raise Unreadable(f"The stored {kind.replace('_', ' ')} '{printable(id)}' cannot be read.") from None


def decoded(kind: str, rows: Iterable[ListedItem], value_type: type[T]) -> Iterator[tuple[ListedItem, T]]:
    """Rows with their decoded values; undecodable rows are logged and left out."""
    for row in rows:
        try:
            value = decode(kind, row.id, row.value, value_type)
        except Unreadable:
            continue
        yield row, value


def connect(folder: Path | None) -> sqlite3.Connection:
    place = ""  # a file without a name, which SQLite makes once there is more than a little
    if folder is not None:
        make_private_folder(folder, lambda name: name.startswith(FILE_NAME))
        make_private_database(folder / FILE_NAME)
        place = str(folder / FILE_NAME)
    database = sqlite3.connect(place, isolation_level=None)
    # A name that is not valid UTF-8 must not make all rows unreadable.
    database.text_factory = lambda text: text.decode(errors="replace")
    # So that unused pages can be given back; it takes effect in a new file, or after VACUUM.
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    # Every committed transaction is durable.
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    database.executescript(_SCHEMA)
    if database.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sizes'").fetchone() is None:
        database.executescript(f"BEGIN IMMEDIATE; {_SIZES} COMMIT;")
    return database
