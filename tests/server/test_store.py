"""What is kept: its room, its privacy, and what a put costs."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo_server.durable import store as store_module
from octavo_server.durable.store import FILE_NAME, Store, StoredItem, decoded
from octavo_server.http.error_responses import StorageFull, StorageUnavailable

DAY = 86400.0


class Opened:
    """A store, with its methods called from outside an event loop."""

    def __init__(self, folder: Path | None) -> None:
        self.store = Store(folder, DAY)

    def put(self, kind: str, id: str, value: bytes, owner: str = "") -> None:
        asyncio.run(self.store.put(kind, id, owner, value))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def on_thread(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        return self.store._thread.submit(work, self.store._database).result()

    def on_thread_later(self, work: Callable[[sqlite3.Connection], Any]) -> None:
        self.store._thread.submit(work, self.store._database)

    def execute(self, sql: str, *values: Any) -> Any:
        return self.on_thread(lambda database: database.execute(sql, values).fetchone())

    def size(self) -> int:
        """The total that is kept of all values, which must be right."""
        (total,) = self.execute("SELECT coalesce(sum(bytes), 0) FROM sizes")
        assert total == self.execute("SELECT coalesce(sum(length(value)), 0) FROM items")[0]
        return int(total)


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened(None)
    yield opened
    opened.store.close()


def steps_of_a_put(opened: Opened, id: str) -> int:
    """How many instructions SQLite executes for it."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    opened.on_thread(lambda database: database.set_progress_handler(count, 1))
    opened.put("response", id, b"x" * 10)
    opened.on_thread(lambda database: database.set_progress_handler(None, 0))
    return steps


def test_a_put_costs_the_same_however_much_is_kept(opened: Opened) -> None:
    opened.put("response", "first", b"x")
    alone = steps_of_a_put(opened, "a")
    many = [StoredItem("response", f"r{i}", b"x" * 10) for i in range(2000)]
    opened.run(opened.store.put_all("", many))
    assert steps_of_a_put(opened, "b") <= alone + 20


def test_the_room_that_is_used_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(tmp_path)
    for id, value in (("a", b"x" * 10), ("b", b"x" * 20), ("a", b"x" * 5), ("c", b"")):
        opened.put("file", id, value)
        opened.size()
    assert opened.run(opened.store.delete("file", "b", ""))
    assert not opened.run(opened.store.delete("file", "b", ""))
    assert not opened.run(opened.store.delete("file", "a", "another"))
    opened.size()
    opened.execute("UPDATE items SET created = 0 WHERE id = 'a'")
    opened.put("file", "d", b"x" * 70)
    assert opened.size() == 75
    assert opened.run(opened.store.get("file", "a", "")) is None
    opened.run(opened.store.tidy())
    assert opened.size() == 70
    opened.store.close()

    monkeypatch.setattr(store_module, "MAX_BYTES", 100)
    again = Opened(tmp_path)
    again.size()
    again.put("line", "1", b"x" * 15)
    again.put("line", "2", b"x" * 15, owner="another")
    with pytest.raises(StorageFull, match="50 bytes"):
        again.run(again.store.put_all("", [StoredItem("file", "e", b"x"), StoredItem("file", "f", b"x" * 30)]))
    again.size()
    assert again.run(again.store.get("file", "e", "")) is None
    again.run(again.store.put_all("another", [StoredItem("file", "g", b"x" * 15)], instead_of="line"))
    again.size()
    assert [row.id for row in again.run(again.store.list("line"))] == ["1"]
    again.store.close()


def test_what_expired_makes_room_for_new_items(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 100)
    opened.put("file", "old", b"x" * 90)
    opened.execute("UPDATE items SET created = 0")
    opened.put("file", "new", b"x" * 20)
    assert opened.size() == 20


def test_a_database_of_an_earlier_version(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute(
            "CREATE TABLE items (kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, "
            "value BLOB NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID"
        )
        database.execute("CREATE INDEX items_by_age ON items (kind, created)")
        database.execute("INSERT INTO items VALUES ('file', 'a', '', 1e12, x'0102')")
    for _ in range(2):
        opened = Opened(tmp_path)
        opened.put("file", "b", b"x" * 5)
        assert opened.size() == 7
        assert opened.run(opened.store.get("file", "a", "")) == b"\1\2"
        opened.store.close()


def test_writes_that_wait_are_committed_together(opened: Opened) -> None:
    commits: list[str] = []

    def note(sql: str) -> None:
        commits.extend([sql] if sql == "COMMIT" else [])

    async def many() -> list[object]:
        puts = [opened.store.put("response", str(i), "", b"x" * i) for i in range(50)]
        bad = opened.store.put_all("", [StoredItem("response", "half", b"x"), StoredItem("response", "bad", None)])  # type: ignore[arg-type]
        return await asyncio.gather(*puts[:25], bad, *puts[25:], return_exceptions=True)

    blocked = threading.Event()
    opened.store._thread.submit(blocked.wait)
    opened.on_thread_later(lambda database: database.set_trace_callback(note))
    threading.Timer(0.2, blocked.set).start()
    results = asyncio.run(many())
    # The one that failed has no effect, and no other is lost with it.
    assert [place for place, result in enumerate(results) if result is not None] == [25]
    assert isinstance(results[25], sqlite3.IntegrityError)
    assert {row.id: len(row.value) for row in opened.run(opened.store.list("response"))} == {
        str(i): i for i in range(50)
    }
    opened.size()
    assert len(commits) == 50  # as one of them failed
    commits.clear()
    blocked.clear()
    opened.store._thread.submit(blocked.wait)
    threading.Timer(0.2, blocked.set).start()

    async def good() -> None:
        await asyncio.gather(*(opened.store.put("response", str(i), "", b"y") for i in range(50)))

    asyncio.run(good())
    assert len(commits) == 1


def test_the_file_becomes_smaller_when_items_expire(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.run(opened.store.put_all("", [StoredItem("file", str(i), b"x" * 100_000) for i in range(100)]))
    opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / FILE_NAME).stat().st_size > 10_000_000
    opened.execute("UPDATE items SET created = 0")
    before = steps_of_a_put(opened, "a")
    assert before < 1000  # nothing that expired is deleted by a put
    opened.run(opened.store.tidy())
    opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / FILE_NAME).stat().st_size < 200_000
    assert opened.size() == 10
    opened.store.close()


def test_a_full_disk_and_a_database_that_fails(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    opened.put("file", "a", b"x")
    (pages,) = opened.execute("PRAGMA page_count")
    opened.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(3):
        with pytest.raises(StorageFull) as full:
            opened.put("file", "b", b"x" * 100_000)
    assert (full.value.status, full.value.code, full.value.retry_after) == (507, "storage_full", 5)
    opened.size()
    assert opened.run(opened.store.get("file", "a", "")) == b"x"
    # One line tells of it, not one of each attempt.
    assert sum("disk is full" in record.message for record in caplog.records) == 1
    opened.execute("PRAGMA max_page_count = 100000")
    opened.put("file", "b", b"x" * 100_000)
    opened.execute("DROP TABLE items")
    with pytest.raises(StorageUnavailable) as failed:
        opened.run(opened.store.get("file", "a", ""))
    assert failed.value.status == 503
    assert "items" not in failed.value.message


def test_rows_that_cannot_be_read_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = Opened(tmp_path)
    opened.put("batch", "good", b'{"a": 1}')
    for id, value in (("bad", b"\xff{"), ("text", '{"b": 2}'), ("shape", b"[]"), ("deep", b"[" * 5000)):
        opened.execute("INSERT INTO items VALUES ('batch', ?, '', 1e12, ?)", id, value)
    opened.execute("INSERT INTO items VALUES ('batch', CAST(x'ff' AS TEXT), '', 1e12, '7')")
    rows = opened.run(opened.store.list("batch"))
    assert {row.id: value for row, value in decoded("batch", rows, dict)} == {"good": {"a": 1}, "text": {"b": 2}}
    told = "\n".join(record.message for record in caplog.records)
    assert all(f"batch {id} cannot be read" in told for id in ("bad", "shape", "deep", "?"))
    assert len(opened.run(opened.store.list("batch"))) == 6
    opened.store.close()


def modes(folder: Path) -> dict[str, int]:
    return {path.name.removeprefix(FILE_NAME): path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}


def test_only_the_owner_reads_the_database(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        folder = tmp_path / "new" / "state"
        opened = Opened(folder)
        private = {"state": 0o700, "": 0o600, "-wal": 0o600, "-shm": 0o600}
        assert modes(folder) == private
        # As an earlier version left it.
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
        again = Opened(folder)
        assert modes(folder) == private
        opened.store.close()
        again.store.close()
        # Others may need a folder that holds more than the database.
        (folder / "notes").write_bytes(b"")
        folder.chmod(0o755)
        Opened(folder).store.close()
        assert modes(folder)["state"] == 0o755
        assert modes(folder)[""] == 0o600
    finally:
        os.umask(umask)
