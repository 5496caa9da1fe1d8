"""The log: groups, new files, and what a reader makes of damage."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from octavo_server.durable import synced_log
from octavo_server.durable.synced_log import Damage, LogFile, LogWriter, log_files

NUM_DAMAGES = 500


def record(text: bytes) -> Callable[[], bytes]:
    return partial(bytes, text)


def payloads(folder: Path, damage: Damage | None = None) -> list[bytes]:
    return [payload for file in log_files(folder) for payload in file.read(damage or Damage())]


def test_what_was_synced_is_there_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        writer = LogWriter(tmp_path / "log")
        for number in range(300):
            writer.append(record(b"%d" % number))
        await writer.synced()
        assert payloads(tmp_path / "log") == [b"%d" % number for number in range(300)]
        writer.append(record(b"last"))
        writer.close()
        assert payloads(tmp_path / "log")[-1] == b"last"

    asyncio.run(main())
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_a_new_file_replaces_the_older_ones(tmp_path: Path) -> None:
    async def main() -> None:
        writer = LogWriter(tmp_path)
        writer.append(record(b"old"))
        await writer.synced()
        writer.roll([record(b"kept")])
        writer.append(record(b"new"))
        await writer.synced()
        writer.close()

    asyncio.run(main())
    assert payloads(tmp_path) == [b"kept", b"new"]
    assert len(log_files(tmp_path)) == 1


def test_two_writers_are_refused(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    with pytest.raises(BlockingIOError):
        LogWriter(tmp_path)
    writer.close()


def test_a_disk_that_fails_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        writer = LogWriter(tmp_path)
        writer.append(record(b"one"))
        await writer.synced()

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(synced_log.os, "write", full)
            writer.append(record(b"lost"))
            await writer.synced()
        writer.append(record(b"two"))
        await writer.synced()
        assert writer.num_failures == 1
        writer.close()

    asyncio.run(main())
    assert payloads(tmp_path) == [b"one", b"two"]


def test_a_snapshot_that_does_not_fit_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each attempt on a full disk would leave one, with what little fitted."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        writer = LogWriter(tmp_path)
        writer.append(record(b"one"))
        await writer.synced()
        with monkeypatch.context() as patch:
            patch.setattr(synced_log.os, "write", full)
            for _ in range(3):
                writer.roll([record(b"snapshot")])
                await writer.synced()
        assert len(log_files(tmp_path)) == 1
        writer.append(record(b"two"))
        await writer.synced()
        writer.close()

    asyncio.run(main())
    assert payloads(tmp_path) == [b"one", b"two"]


def test_a_new_file_that_cannot_be_made_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first record, and when a file shall replace the older ones."""
    open_file = os.open

    def no_new(path: str, flags: int, *more: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(24, "Too many open files")
        return open_file(path, flags, *more)

    async def main() -> None:
        writer = LogWriter(tmp_path)
        for name in (b"one", b"two"):
            with monkeypatch.context() as patch:
                patch.setattr(synced_log.os, "open", no_new)
                writer.roll([record(b"lost")])
                await writer.synced()
                assert writer.is_incomplete
            writer.append(record(name))
            await writer.synced()
        assert payloads(tmp_path) == [b"one", b"two"]
        writer.roll([record(b"all")])
        await writer.synced()
        assert not writer.is_incomplete
        writer.close()

    asyncio.run(main())
    assert payloads(tmp_path) == [b"all"]


def test_no_damage_makes_a_wrong_record(tmp_path: Path) -> None:
    """Truncations and flipped bits: what is read is what was written, in order, less what was hit."""
    rng = random.Random(1)
    file = LogFile.next(tmp_path, 1)
    written = [b"%d:" % number + rng.randbytes(rng.randrange(200)) for number in range(60)]
    # A client may send what looks like a record of another file.
    written[7] = LogFile.next(tmp_path, 2).frame(b"forged")
    whole = b"".join(map(file.frame, written))
    for _ in range(NUM_DAMAGES):
        content = bytearray(whole)
        hits = rng.randrange(4)
        for _ in range(hits):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        end = rng.randrange(len(content) + 1) if not hits or rng.random() < 0.5 else len(content)
        file.path.write_bytes(content[:end])
        damage = Damage()
        found = list(file.read(damage))
        rest = iter(written)
        assert all(payload in rest for payload in found)
        assert len(found) >= len([1 for place in range(len(written)) if _end(written, place) <= end]) - hits
        assert damage.records <= hits
        assert (damage.tail_bytes > 0) == (end > sum(map(_size, found)) and not _ends_with(content, end, found, file))


def _size(payload: bytes) -> int:
    return len(payload) + 12


def _end(written: list[bytes], place: int) -> int:
    return sum(map(_size, written[: place + 1]))


def _ends_with(content: bytearray, end: int, found: list[bytes], file: LogFile) -> bool:
    """Whether the last readable record is the last thing in the file."""
    return bool(found) and bytes(content[:end]).endswith(file.frame(found[-1]))


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "000000000001-xyz.journal").write_text("not a log")
    assert log_files(tmp_path) == []
    writer = LogWriter(tmp_path)
    writer.roll([])
    writer.close()
    assert (tmp_path / "notes.txt").exists()
    assert os.path.exists(tmp_path / "000000000001-xyz.journal")
