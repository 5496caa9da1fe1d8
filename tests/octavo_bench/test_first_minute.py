"""The first minute of a server: figures by second, and their plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.cli import build_parser
from octavo_bench.records import plots
from octavo_bench.serving.first_minute import figures_of
from octavo_bench.serving.stream_reader import Streamed, TimedRequest

READY = 100.0


def answer(sent: float, times: list[float], counts: list[int]) -> Streamed:
    streamed = Streamed(TimedRequest(0.0, b""), READY + sent)
    streamed.times, streamed.counts = [READY + time for time in times], counts
    return streamed


def test_tokens_and_gaps_count_in_the_second_in_which_they_arrive() -> None:
    slow = answer(0.0, [0.5, 0.9, 1.5, 3.1], [1, 1, 1, 2])
    fast = answer(2.0, [2.2, 2.3, 2.4, 3.2, 3.3], [1, 1, 1, 3, 3])
    late = answer(3.0, [3.9, 4.1], [1, 5])  # what comes after the last second does not count
    found = figures_of([slow, fast, late], READY, 4.0)
    assert [row["tokens"] for row in found["by_second"]] == [2, 1, 3, 9]
    assert [row["itl_p50"] for row in found["by_second"]] == [400.0, 600.0, 100.0, 800.0]
    assert found["later_output_tok_s"] == 6.0
    assert found["first_10_s_output_tok_s"] == 3.8
    assert found["ttft_first_ms"] == 200.0


def test_it_is_drawn(tmp_path: Path) -> None:
    rows = [
        {"case": case, "ready_s": 9.0, **figures_of([answer(0.0, [0.5, 1.0], [1, 1])], READY, 3.0)} for case in "ab"
    ]
    record: dict[str, Any] = {"benchmark": "first-minute", "result": {"model": "tiny", "rows": rows}}
    path = tmp_path / "minute.svg"
    plots.draw(record, path)
    assert "seconds since the server was ready" in path.read_text()


@pytest.mark.slow
def test_a_server_is_started_and_loaded(tmp_path: Path) -> None:
    flags = "--clients 2 --prompt 4 --decode 8 --seconds 2 --vocab-size 200 --starts 1"
    command = ["bench", "first-minute", "toy", *flags.split(), "--octavo-args", "--backend toy"]
    args = build_parser().parse_args([*command, "--logs", str(tmp_path)])
    (row,) = args.measure(args)["rows"]
    assert row["case"] == "octavo, start 1"
    assert row["later_output_tok_s"] > 0
