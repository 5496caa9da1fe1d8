"""Sweeps, decoding without a cache, the limit of memory, and evidence, over a model of random weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo_bench import sweep
from octavo_bench.dummy_models import write_model
from octavo_bench.record_figures import figures
from octavo_bench.sweep import PARTS, Try, memory_limit

WORK = ("--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--rounds", "1", "--num-kv-blocks", "40")


def run(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    model = (str(write_model("tiny", tmp_path / "model")), "--load-format", "dummy", "--device", "cpu")
    output = tmp_path / "record.json"
    assert main(["bench", command[0], *model, *command[1:], "--output", str(output)]) == 0
    rows: list[dict[str, Any]] = json.loads(output.read_text())["result"]["rows"]
    return rows


def test_a_setting_and_a_length_are_swept(tmp_path: Path) -> None:
    rows = run(tmp_path, "sweep", "--vary", "block-size", "--values", "4,16", *WORK)
    assert [row["block_size"] for row in rows] == [4, 16]
    small, large = ({name: row[name]["median"] for name in row if name != "block_size"} for row in rows)
    assert small["most_used_blocks"] > large["most_used_blocks"]
    assert small["empty_slots_percent"] < large["empty_slots_percent"]
    assert small["context_tokens"] == large["context_tokens"]
    assert 60 <= large["context_tokens"] <= 72
    assert small["output_tok_s"] > 0 == small["preemptions"]
    assert [row["input_len"] for row in run(tmp_path, "sweep", "--vary", "input_len", "--values", "4,8", *WORK)] == [
        4,
        8,
    ]


def test_a_prefix_cache_is_tried_with_prompts_that_share_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("sweep", "--vary", "enable_prefix_caching", "--values", "true,false", *WORK, "--block-size", "4")
    on, off = run(tmp_path, *command, "--shared-len", "16", "--gap", "0.01")
    assert (on["prefix_hits"]["median"], off["prefix_hits"]["median"]) == (32, 0)
    assert on["ttft_ms"]["median"] > 0 < on["itl_p99_ms"]["median"]
    assert main(["bench", *command, str(tmp_path / "model"), "--load-format", "dummy"]) == 2
    assert "changes nothing for prompts that share nothing; --shared-len" in capsys.readouterr().err


def test_what_cannot_vary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_model("tiny", tmp_path / "model"))
    assert main(["bench", "sweep", folder, "--load-format", "dummy", "--vary", "colour", "--values", "1"]) == 2
    assert "vary: 'colour' is neither a setting of the engine nor one of input_len" in capsys.readouterr().err


def test_decoding_without_a_cache_takes_longer_with_the_context(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    command = ("recompute", "--lengths", "16,400", "--tokens", "3", "--rounds", "3", "--evidence", str(evidence))
    short, long = run(tmp_path, *command)
    assert (short["context"], long["context"]) == (16, 400)
    assert long["recomputed_ms"]["min"] > long["cached_ms"]["min"]
    assert long["recomputed_tok_s"]["max"] == pytest.approx(1e3 / long["recomputed_ms"]["min"], rel=0.01)
    assert {"record.json", "command.txt", "packages.txt"} <= {file.name for file in evidence.iterdir()}
    assert json.loads((evidence / "record.json").read_text())["result"]["rows"] == [short, long]


def test_evidence_never_mixes_with_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/other").touch()
    assert main(["bench", "ceilings", "--evidence", str(tmp_path / "evidence")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [8192, 5000, 256])
def test_the_limit_is_found_by_trying(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_try", lambda model, gib, length, *_: Try("" if length <= limit else "no memory"))
    found = memory_limit([], None, 8192, lambda line: None)
    assert limit - 8192 // PARTS < found["longest_context"] <= limit
    assert len(found["rows"]) <= 6
    assert all(bool(row["failed"]) == (row["context"] > limit) for row in found["rows"])


def test_the_largest_batch_is_found_paged_and_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(model: object, gib: object, length: int, count: int, block_size: int) -> Try:
        slots = count * -(-length // block_size) * block_size
        return Try("" if slots <= 8192 else "no memory", float(slots))

    monkeypatch.setattr(sweep, "_try", tried)
    found = sweep.largest_batches([], None, 64, 256, 1024, lambda line: None)
    assert found["largest_batch"] == {"paged": 32, "contiguous": 8}
    assert [row["sequences"] for row in found["rows"] if row["cache"] == "contiguous"] == [1, 2, 4, 8, 9, 10, 12, 16]
    drawn = figures({"result": found})
    assert {one.case: one.value for one in drawn if one.name == "largest_batch"} == {"paged": 32, "contiguous": 8}
    with pytest.raises(ConfigError, match="not one sequence of 9000 tokens fits"):
        sweep.largest_batches([], None, 64, 9000, 9000, lambda line: None)


def test_a_limit_that_nothing_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_try", lambda *_: Try("no memory"))
    with pytest.raises(ConfigError, match="256 tokens do not fit: no memory"):
        memory_limit([], None, 8192, lambda line: None)


def test_a_whole_context_is_served_and_drawn(tmp_path: Path) -> None:
    """Prompts of many steps, too: each may add a token before those that are timed."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "limit.svg"
    (row,) = run(tmp_path, "limit", "--longest", "4096", "--plot", str(plot))
    assert row["context"] == 4096
    assert 50 < row["peak_memory_mib"] < 5000
    assert "peak memory" in plot.read_text()


def test_what_a_model_refuses_is_no_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "octavo: error: max_model_len: 10000 is more than the model's 8192\n"
    ended = subprocess.CompletedProcess([], 2, stdout="", stderr=refusal)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: ended)
    with pytest.raises(ConfigError, match="limit: 10000 tokens: max_model_len: 10000 is more"):
        memory_limit([], None, 10000, lambda line: None)
