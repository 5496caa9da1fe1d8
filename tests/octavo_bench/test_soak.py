"""Requests of all kinds against a real server, and what is concluded from its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo_bench.soak import KINDS, MemorySample, growth


def test_growth_is_that_after_the_warm_up() -> None:
    """A wave at the end and a high sample do not count, a slope does."""
    flat = [MemorySample(number, 10_000 + min(number, 30) * 1000, 0, 0) for number in range(0, 101, 2)]
    flat[40] = flat[40]._replace(memory=1 << 40)
    assert growth(flat) == 0
    assert growth([sample._replace(memory=sample.memory + 7 * sample.requests) for sample in flat]) == 7


@pytest.mark.slow
def test_every_kind_is_answered(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = ["bench", "soak", "--num-requests", str(20 * len(KINDS)), "--most", "1e9", "--output", str(output)]
    assert main(command) == 0
    result = json.loads(output.read_text())["result"]
    assert result["answers"] == dict.fromkeys(KINDS, 20)
    assert main([*command[:3], "12", "--most=-1e9"]) == 1
