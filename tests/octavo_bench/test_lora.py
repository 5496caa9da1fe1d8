"""The measurement of adapters, on a model that is too small to say anything."""

from __future__ import annotations

from pathlib import Path

from octavo_bench.lora import step_times
from tests.models.families import make_checkpoint


def test_every_number_of_adapters_is_measured(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", "llama/gqa")
    times = step_times(tmp_path / "base", tmp_path / "adapters", [0, 3], num_seqs=4, rank=2, steps=4, rounds=2)
    assert list(times) == [0, 3]
    assert all(len(ms) >= 2 and min(ms) > 0 for ms in times.values())
