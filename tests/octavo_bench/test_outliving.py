"""What is still cached after a server ended: the measurement, small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo_bench.chaos.tiny_model import write_tiny_model
from octavo_bench.outliving import damage, measure, run


def test_what_is_damaged_is_not_what_it_was(tmp_path: Path) -> None:
    draw, found = random.Random(0), set()
    for number in range(40):
        path = tmp_path / str(number)
        path.write_bytes(content := draw.randbytes(50))
        damage(path, draw)
        damaged = path.read_bytes() if path.exists() else None
        assert damaged != content
        found.add(-1 if damaged is None else len(damaged) if len(damaged) in (0, 50) else 1)
    assert found == {-1, 0, 1, 50}, "removed, emptied, cut off, and as long as it was"


@pytest.mark.nightly
def test_a_prompt_outlives_each_end_of_its_server(tmp_path: Path, socket_folder: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    found = measure(str(model), ["--load-format", "dummy"], socket_folder, prompt=500, idle=3, num_damaged=5)
    *ends, damaged, of_one = found["rows"]
    assert [row["case"] for row in ends] == ["SIGTERM", "kill -9 after 3 s", "sleep and wake", "takeover"]
    assert all(row["right"] == row["requests"] for row in found["rows"])
    assert all(row["cached_tokens"] == 480 for row in ends if "kill" not in row["case"]), "but for the last block"
    assert damaged["bad_files"] == 5
    assert damaged["cached_tokens"] <= 5 * 64, "at most two blocks of three"
    assert of_one["case"] == "5 damaged files of one prompt"
    assert of_one["bad_files"] >= 1
    assert of_one["cached_tokens"] < 480


@pytest.mark.nightly
def test_large_blocks_outlive_each_end_of_their_server() -> None:
    """16 MiB each, of which the random model "wide" has one for 4 tokens."""
    found = run("wide", kv_cache_memory=0.5, prompt=64, idle=5, damaged=2)
    *ends, damaged, _ = found["rows"]
    assert all(row["right"] == row["requests"] for row in found["rows"])
    assert all(row["cached_tokens"] == 60 for row in ends if "kill" not in row["case"]), "but for the last block"
    assert damaged["bad_files"] == 2
