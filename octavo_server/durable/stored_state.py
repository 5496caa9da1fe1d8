"""Checks, backups and compaction of the database of a state folder, also while a server uses it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.system.private_files import write_private
from octavo_server.durable.store import FILE_NAME, connect

MAX_PROBLEMS = 20
BUSY_SECONDS = 30


class StoredKind(NamedTuple):
    """All items of one kind."""

    name: str
    num_items: int
    num_bytes: int
    oldest: float
    """Seconds since 1970."""


class Report(NamedTuple):
    """What a database holds."""

    kinds: list[StoredKind]
    num_bytes: int
    """Size of the file."""
    num_unused: int
    """Bytes of the file that hold nothing."""
    problems: list[str]
    """What is damaged."""


def check(folder: Path) -> Report:
    """Read the whole database. Raises ``ConfigError`` if there is none or it cannot be opened."""
    with _opened(folder) as database:
        try:
            problems = [str(row[0]) for row in database.execute(f"PRAGMA integrity_check({MAX_PROBLEMS})")]
            # Results of the lines of a batch are a kind for each batch, and pieces of a file for each file.
            kinds = database.execute(
                "SELECT CASE WHEN kind LIKE 'lines of %' THEN 'lines of batches' "
                "WHEN kind LIKE 'pieces of %' THEN 'pieces of files' ELSE kind END AS name, "
                "count(*), sum(length(value)), min(created) FROM items GROUP BY name ORDER BY name"
            ).fetchall()
            page, total, unused = (_number(database, name) for name in ("page_size", "page_count", "freelist_count"))
        except sqlite3.DatabaseError as error:
            return Report([], (folder / FILE_NAME).stat().st_size, 0, [str(error)])
    return Report(
        [StoredKind(*kind) for kind in kinds], page * total, page * unused, [p for p in problems if p != "ok"]
    )


def export(folder: Path, target: Path) -> int:
    """Write a copy of the database to a new file; return its size in bytes.

    The copy holds everything that was committed when it began, and can be the database of another state folder. Raises
    ``ConfigError``.
    """
    if target.exists():
        raise ConfigError(f"state: {target} exists already")
    with _opened(folder) as database:
        try:
            write_private(target, b"")
            database.execute("VACUUM INTO ?", (str(target),))
        except (OSError, sqlite3.Error) as error:
            target.unlink(missing_ok=True)
            raise ConfigError(f"state: cannot write {target}: {error}") from None
    return target.stat().st_size


def vacuum(folder: Path) -> int:
    """Rewrite the database without unused room; return its size in bytes. Raises ``ConfigError``.

    A server waits meanwhile.
    """
    _existing(folder)
    try:
        with closing(connect(folder)) as database:
            database.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"state: cannot compact {folder / FILE_NAME}: {error}") from None
    return (folder / FILE_NAME).stat().st_size


@contextmanager
def _opened(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database, for reading."""
    path = _existing(folder)
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise ConfigError(f"state: cannot open {path}: {error}") from None
    with closing(database):
        yield database


def _existing(folder: Path) -> Path:
    path = folder / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"state: there is no database {path}")
    return path


def _number(database: sqlite3.Connection, pragma: str) -> int:
    return int(database.execute(f"PRAGMA {pragma}").fetchone()[0])
