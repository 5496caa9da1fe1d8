"""The suites of GPT-2, on a model that is too small to say anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo_bench.suites import FULL, PUBLISHED, SMALL, row

ARGUMENTS = ["bench", "suites", "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--small", "--rounds", "1"]


@pytest.mark.nightly
def test_every_suite_gives_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "suites.json"
    assert main([*ARGUMENTS, "--output", str(output)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text())["result"] == record["result"]
    rows = record["result"]["rows"]
    suites = {found["suite"] for found in rows}
    assert suites == {*PUBLISHED, "continuous tok/s", "pressure tok/s", "http latency ms"}
    assert all(found["value"]["median"] > 0 for found in rows)
    assert not any("published" in found for found in rows), "another model's figures beside these sizes"
    memory = {found["case"]: found for found in rows if found["suite"] == "memory ratio"}
    assert memory["16"]["value"]["median"] > memory["1"]["value"]["median"] > 1


def test_published_figures_are_in_the_rows_of_their_cases() -> None:
    assert row(FULL, "latency s", 64, [0.1])["times_better"] == pytest.approx(2.77)
    assert row(FULL, "batch tok/s", 512, [36692])["times_better"] == pytest.approx(2)
    assert "published" not in row(FULL, "batch tok/s", 64, [1.0])
    assert "published" not in row(SMALL, "batch tok/s", 1, [1.0])
    named = {"latency s": FULL.prompts, "throughput tok/s": FULL.outputs, "batch tok/s": FULL.batches}
    for suite, cases in named.items():
        assert set(PUBLISHED[suite]) <= set(map(str, cases))
    assert {case.split(", ")[1] for case in PUBLISHED["http tok/s"]} <= set(map(str, FULL.concurrencies))


def test_an_unknown_suite_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--suites", "alone,fast"]) == 2
    assert "'fast' is not one of alone, uneven, pressed, http" in capsys.readouterr().err
