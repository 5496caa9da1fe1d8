"""Tiers keep what they are given, or nothing: never something else."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.cache import offload_tiers
from octavo.cache.offload_tiers import INDEX, LEAST_TELLING_BYTES, CopyRate, DiskTier, HostTier
from octavo.errors import ConfigError


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(100)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(INDEX))


def put(tier: HostTier, number: int) -> list[int]:
    """Put a content; returns the numbers of those that it displaces."""
    before = [i for i in range(10) if key(i) in tier]
    tier.put(key(number), content(number))
    return [i for i in before if key(i) not in tier]


def test_host_memory_gives_up_what_was_used_longest_ago() -> None:
    tier = HostTier(300)
    assert [put(tier, i) for i in range(3)] == [[], [], []]
    assert tier.get(key(0)) == content(0)
    assert put(tier, 3) == [1]
    assert key(1) not in tier
    assert tier.get(key(1)) is None
    assert put(tier, 0) == []
    assert tier.num_bytes == 300
    assert put(tier, 4) == [2]
    assert put(tier, 5) == [3]
    assert [tier.get(key(i)) for i in (0, 4, 5)] == [content(i) for i in (0, 4, 5)]
    tier.put(key(9), bytes(1000))
    assert not any(key(i) in tier for i in range(10))
    assert tier.num_bytes == 0


def test_buffers_of_which_parts_are_kept_take_twice_the_capacity_at_most() -> None:
    rng, tier, most = random.Random(0), HostTier(1000), 0
    kept: dict[bytes, tuple[int, bytes | memoryview]] = {}
    for number in range(200):
        buffer = bytearray(rng.randrange(1, 400))
        for part in range(rng.randrange(1, 4)):
            some = memoryview(buffer)[:20] if rng.random() < 0.8 else bytes(50)
            name = key(10 * number + part)
            kept[name] = (len(buffer) if isinstance(some, memoryview) else 50), some
            tier.put(name, some)
            kept = {name: one for name, one in kept.items() if name in tier}
            whole = {id(one.obj if isinstance(one, memoryview) else one): size for size, one in kept.values()}
            assert tier.num_bytes == sum(len(one) for _, one in kept.values()) <= 1000
            assert sum(whole.values()) <= 2000
            most = max(most, sum(whole.values()))
    assert most > 1900


def test_a_disk_forgets_files_when_it_is_full_and_finds_the_others_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", 300)
    for number in range(4):
        tier.put(key(number), content(number))
    assert len(files(tmp_path)) == 3
    tier.close()
    again = DiskTier(tmp_path / "kv", 300)
    assert [again.get(key(number)) for number in range(4)] == [None, *map(content, range(1, 4))]
    assert again.num_bytes == 300
    again.put(key(4), content(4))
    assert key(1) not in again
    again.close()


def test_of_a_prefix_the_end_is_given_up_first() -> None:
    tier = HostTier(400)
    for number in range(4):
        tier.put(key(number), content(number))
    tier.touch([key(1), key(9), key(2), key(3)])
    assert [put(tier, number) for number in range(4, 8)] == [[0], [3], [2], [1]]


def test_a_rate_is_the_last_that_was_measured_of_many_bytes() -> None:
    rate, many = CopyRate(), LEAST_TELLING_BYTES
    rate.learn(many - 1, 1e6)
    rate.grow()
    assert rate.seconds(many) == 0.0, "few bytes tell nothing"
    rate.learn(many, 2.0)
    assert (rate.seconds(many), rate.seconds(3 * many), rate.seconds(many - 1)) == (2.0, 6.0, 0.0)
    for _ in range(8):
        rate.grow()
    assert 0.9 < rate.seconds(many) < 1.0
    rate.learn(2 * many, 1.0)
    assert rate.seconds(many) == 0.5


def test_several_threads_read_and_write(tmp_path: Path) -> None:
    """Some files are damaged, and others given up, meanwhile."""
    tier = DiskTier(tmp_path, 40 * 100)

    def use(number: int) -> bool:
        tier.put(key(number), content(number))
        if number % 7 == 0:
            files(tmp_path)[0].write_bytes(b"")
        return tier.get(key(number // 2)) in (None, content(number // 2))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(100)))
    there = [number for number in range(100) if key(number) in tier]
    assert tier.num_bytes == 100 * len(there) <= 4000
    assert sum(tier.get(key(number)) == content(number) for number in there) > 10
    tier.close()


def modes(folder: Path) -> set[tuple[str, int]]:
    return {("folder" if path.is_dir() else "file", path.stat().st_mode & 0o777) for path in folder.rglob("*")}


def test_only_the_owner_reads_what_is_on_the_disk(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        tier = DiskTier(tmp_path / "kv", 1000)
        tier.put(key(1), content(1))
        assert modes(tmp_path) == {("folder", 0o700), ("file", 0o600)}
        tier.close()
        # As an earlier version left it.
        for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        again = DiskTier(tmp_path / "kv", 1000)
        assert modes(tmp_path) == {("folder", 0o700), ("file", 0o600)}
        assert again.get(key(1)) == content(1)
        again.close()
        # Others may need a folder that holds more than blocks.
        (tmp_path / "kv/notes").write_bytes(b"")
        (tmp_path / "kv").chmod(0o755)
        DiskTier(tmp_path / "kv", 1000).close()
        assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(umask)


def flip(path: Path) -> None:
    stored = bytearray(path.read_bytes())
    stored[random.randrange(len(stored))] ^= 1 << random.randrange(8)
    path.write_bytes(stored)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": flip,
    "a folder": make_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_can_be_stored_again(tmp_path: Path, damage: str) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key(1), content(1))
    DAMAGES[damage](files(tmp_path)[0])
    assert key(1) in tier
    assert tier.get(key(1)) is None
    assert key(1) not in tier
    assert tier.num_bytes == 0
    assert tier.num_bad >= 1
    if damage != "a folder":
        tier.put(key(1), content(1))
        assert tier.get(key(1)) == content(1)


def test_files_cannot_be_taken_for_one_another(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key(1), content(1))
    (first,) = files(tmp_path)
    tier.put(key(2), content(2))
    (second,) = set(files(tmp_path)) - {first}
    second.write_bytes(first.read_bytes())
    assert tier.get(key(2)) is None


def test_files_of_another_format_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key(1), content(1))
    with monkeypatch.context() as patch:
        patch.setattr(offload_tiers, "FORMAT", b"another")
        assert key(1) not in tier
        assert (tier.get(key(1)), tier.num_bad) == (None, 0)
    assert tier.get(key(1)) == content(1)


def test_a_damaged_index_is_begun_anew(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1000).close()
    (tmp_path / INDEX).write_bytes(b"nonsense" * 1000)
    tier = DiskTier(tmp_path, 1000)
    tier.put(key(1), content(1))
    assert tier.get(key(1)) == content(1)


@pytest.mark.parametrize(
    "row", [(key(2), "x"), (key(2), b"9"), (key(2), -400), (key(2), 10**12), (key(2), 9.5), ("x", 9)], ids=repr
)
def test_a_damaged_row_of_the_index_is_ignored(tmp_path: Path, row: tuple[Any, Any]) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key(1), content(1))
    tier.close()
    index = sqlite3.connect(tmp_path / INDEX, isolation_level=None)
    index.execute("INSERT INTO blocks VALUES (?, ?)", row)
    index.close()
    tier = DiskTier(tmp_path, 1000)
    assert (tier.num_bytes, tier.get(key(1)), tier.get(key(2))) == (100, content(1), None)
    tier.close()


def test_nobody_but_writers_waits_for_another_process_with_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_tiers, "REFRESH_SECONDS", 0.0)
    tier = DiskTier(tmp_path, 1000)
    paths = [tier._path(offload_tiers._name_of(key(number))) for number in (1, 2, 3)]
    tier.put(key(1), content(1))
    other = sqlite3.connect(tmp_path / INDEX, isolation_level=None)
    with ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN IMMEDIATE")
        writing = pool.submit(tier.put, key(2), content(2))
        while not tier._writing.locked():
            time.sleep(0.001)
        tier.refresh()
        assert (key(1) in tier, key(2) in tier, tier.path(key(3))) == (True, False, [])
        assert tier.get(key(1)) == content(1)
        paths[0].write_bytes(b"damaged")
        assert (tier.get(key(1)), key(1) in tier, tier.num_bytes, tier.num_bad) == (None, False, 0, 1)
        assert not writing.done()
        other.execute("ROLLBACK")
        writing.result()
    assert tier.get(key(2)) == content(2)
    tier.put(key(3), content(3))
    assert files(tmp_path) == sorted(paths[1:])
    assert other.execute("SELECT count(*) FROM blocks WHERE size >= 0").fetchone() == (2,)
    other.close()
    tier.close()


def test_a_file_is_there_before_other_processes_learn_of_it(tmp_path: Path) -> None:
    """Else one that reads it in between would take it for missing, and delete its entry."""
    tier, found = DiskTier(tmp_path, 1000), []
    path = tier._path(offload_tiers._name_of(key(1)))
    tier._index.set_trace_callback(lambda statement: found.append("INSERT" in statement and path.exists()))
    tier.put(key(1), content(1))
    assert found == [True]
    tier.close()


def test_another_process_learns_of_all_blocks_also_when_the_last_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_tiers, "REFRESH_SECONDS", 0.0)
    reader, writer = DiskTier(tmp_path, 1000), DiskTier(tmp_path, 1000)
    for number in range(1, 9):
        writer.put(key(number), content(number))
        reader.refresh()
        assert key(number) in reader
        writer._path(offload_tiers._name_of(key(number))).unlink()
        assert writer.get(key(number)) is None
        if number % 3 == 0:
            writer.close()
            writer = DiskTier(tmp_path, 1000)
    assert writer.num_bytes == 0
    assert not any(key(number) in writer for number in range(1, 9))
    reader.close()
    writer.close()


def test_what_the_index_cannot_take_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_tiers, "WAIT_SECONDS", 0.0)
    tier = DiskTier(tmp_path, 1000)
    other = sqlite3.connect(tmp_path / INDEX, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    tier.put(key(1), content(1))
    assert (files(tmp_path), tier.num_bad) == ([], 1)
    other.close()
    tier.put(key(1), content(1))
    assert tier.get(key(1)) == content(1)
    tier.close()


def test_a_disk_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", 1000)
    first_letters = tmp_path / "kv" / offload_tiers._name_of(key(1)).hex()[:2]
    first_letters.write_bytes(b"in the way")
    tier.put(key(1), content(1))
    assert tier.get(key(1)) is None
    assert tier.num_bad == 1
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="kv_offload_dir"):
        DiskTier(tmp_path / "file", 1000)


def test_the_owner_of_most_paths_loses_its_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_tiers, "MAX_PATHS", 4)
    tier = DiskTier(tmp_path, 1000)
    for number in range(2):
        tier.put_path(b"a", b"a%d" % number, [key(number)])
    for number in range(20):
        tier.put_path(b"b", b"b%d" % number, [key(number)])
    for number in range(40):
        tier.put_path(b"b", b"unknown%d" % number, [])  # forgets what was never known
    kept = [name for name in (b"a0", b"a1", b"b17", b"b18", b"b19") if tier.path(name)]
    assert kept == [b"a0", b"a1", b"b18", b"b19"]
    tier.put_path(b"b", b"b19", [])
    assert not tier.path(b"b19")
    tier.close()
