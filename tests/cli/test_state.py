"""``octavo state``: what is kept is described, damage is found, and a copy serves as a backup."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.cli import main
from octavo_server.durable.store import FILE_NAME, Store, StoredItem
from octavo_server.durable.synced_log import LogFile

DAY = 86400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder, as a server leaves it that was killed."""
    folder = tmp_path / "state"
    store = Store(folder, DAY)
    lines = [StoredItem("lines of batch_1", str(number), b"x" * 1000) for number in range(2000)]
    asyncio.run(store.put_all("", [*lines, StoredItem("response", "a", b"x" * 20)]))
    return folder


def test_a_sound_database_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", "check", "--state-dir", str(folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:6] == ["lines", "of", "batches", "2000", "1.9", "MiB"]
    assert lines[2][:4] == ["response", "1", "20", "B"]


def test_damage_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", "vacuum", "--state-dir", str(folder)]) == 0
    file = folder / FILE_NAME
    content = bytearray(file.read_bytes())
    content[200_000:300_000] = bytes(100_000)
    file.write_bytes(content)
    assert main(["state", "check", "--state-dir", str(folder)]) == 1
    assert "damaged: " in capsys.readouterr().err
    file.write_bytes(b"no database" * 1000)
    assert main(["state", "check", "--state-dir", str(folder)]) == 1
    assert "not a database" in capsys.readouterr().err


def test_an_exported_file_can_be_served(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "other" / FILE_NAME
    copy.parent.mkdir()
    command = ["state", "export", str(copy), "--state-dir", str(folder)]
    assert main(command) == 0
    assert copy.stat().st_mode & 0o077 == 0
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    store = Store(copy.parent, DAY)
    assert asyncio.run(store.get("response", "a", "")) == b"x" * 20
    asyncio.run(store.put("response", "b", "", b"y"))
    store.close()


def test_vacuum_makes_the_file_small(folder: Path) -> None:
    store = Store(folder, DAY)
    asyncio.run(store.put_all("", [], instead_of="lines of batch_1"))
    before = (folder / FILE_NAME).stat().st_size
    assert main(["state", "vacuum", "--state-dir", str(folder)]) == 0  # while it is served
    assert (folder / FILE_NAME).stat().st_size < before / 10
    asyncio.run(store.put("response", "b", "", b"y"))
    store.close()


def test_a_journal_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LogFile.next(tmp_path, 1)
    frames = [file.frame(b"x" * size) for size in (10, 20, 30)]
    file.path.write_bytes(b"".join(frames))
    assert main(["state", "check", "--journal", str(tmp_path)]) == 0
    assert "3 records, 60 B" in capsys.readouterr().out
    file.path.write_bytes(frames[0] + frames[1][:-1] + b"y" + frames[2] + frames[0][:5])
    assert main(["state", "check", "--journal", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "2 records, 40 B" in captured.out
    assert "1 gaps" in captured.err
    assert "last 5 bytes" in captured.err


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        (["check"], "state_dir: give the server's --state-dir"),
        (["check", "--state-dir", str(tmp_path)], f"there is no database {tmp_path / FILE_NAME}"),
        (["check", "--journal", str(tmp_path / "none")], "No such file"),
        (["export", "--state-dir", str(tmp_path)], "export takes the file"),
        (["vacuum", "x", "--state-dir", str(tmp_path)], "vacuum takes no file"),
    ):
        assert main(["state", *command]) == 2
        assert message in capsys.readouterr().err
