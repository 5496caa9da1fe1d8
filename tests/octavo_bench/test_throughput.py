"""Throughput, also at several values of a setting or a length, and evidence, over a model of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from tests.llm.tiny import write_checkpoint

WORK = ("--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--rounds", "1", "--num-kv-blocks", "40")


def run(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    model = (str(write_checkpoint(tmp_path / "model")), "--load-format", "dummy", "--device", "cpu")
    output = tmp_path / "record.json"
    assert main(["bench", command[0], *model, *command[1:], "--output", str(output)]) == 0
    rows: list[dict[str, Any]] = json.loads(output.read_text())["result"]["rows"]
    return rows


def test_a_setting_and_a_length_are_swept(tmp_path: Path) -> None:
    rows = run(tmp_path, "throughput", "--vary", "block-size", "--values", "4,16", *WORK)
    assert [row["block_size"] for row in rows] == [4, 16]
    small, large = ({name: row[name]["median"] for name in row if name != "block_size"} for row in rows)
    assert small["most_used_blocks"] > large["most_used_blocks"]
    assert small["empty_slots_percent"] < large["empty_slots_percent"]
    assert small["context_tokens"] == large["context_tokens"]
    assert 60 <= large["context_tokens"] <= 72
    assert small["output_tok_s"] > 0 == small["preemptions"]
    assert [
        row["input_len"] for row in run(tmp_path, "throughput", "--vary", "input_len", "--values", "4,8", *WORK)
    ] == [
        4,
        8,
    ]


def test_a_prefix_cache_is_tried_with_prompts_that_share_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("throughput", "--vary", "enable_prefix_caching", "--values", "true,false", *WORK, "--block-size", "4")
    on, off = run(tmp_path, *command, "--shared-len", "16", "--gap", "0.01")
    assert (on["prefix_hits"]["median"], off["prefix_hits"]["median"]) == (32, 0)
    assert on["ttft_ms"]["median"] > 0 < on["itl_p99_ms"]["median"]
    assert main(["bench", *command, str(tmp_path / "model"), "--load-format", "dummy"]) == 2
    assert "changes nothing for prompts that share nothing; --shared-len" in capsys.readouterr().err


def test_what_cannot_vary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_checkpoint(tmp_path / "model"))
    assert main(["bench", "throughput", folder, "--load-format", "dummy", "--vary", "colour", "--values", "1"]) == 2
    assert "vary: 'colour' is neither a setting of the engine nor one of input_len" in capsys.readouterr().err


def test_evidence_is_kept(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    rows = run(tmp_path, "throughput", "--vary", "output_len", "--values", "2,4", *WORK, "--evidence", str(evidence))
    assert {"record.json", "command.txt", "packages.txt"} <= {file.name for file in evidence.iterdir()}
    assert json.loads((evidence / "record.json").read_text())["result"]["rows"] == rows


def test_evidence_never_mixes_with_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/other").touch()
    assert main(["bench", "overhead", "--evidence", str(tmp_path / "evidence")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
