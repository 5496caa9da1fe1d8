"""The journal that is written to measure recovery has all its requests when it is read."""

from __future__ import annotations

from pathlib import Path

from octavo_bench.journal import measure, read, write


def test_every_request_is_read(tmp_path: Path) -> None:
    num_tokens = write(tmp_path, 2_000_000, 8)
    assert num_tokens > 0
    _, num_ended, num_unfinished = read(tmp_path)
    assert 0 < num_unfinished <= 8 < num_ended


def test_its_figures() -> None:
    found = measure(0.5, 4, 2)
    assert found["bytes"] >= 500_000
    assert len(found["seconds"]) == 2
    assert found["mb_per_s"] > 0
