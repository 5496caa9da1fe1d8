"""Tables are printed from raw records, and files that are not records are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo_bench.records.report_tables import fill, number, render

ROOT = Path(__file__).parents[2]
MACHINE = {"processor": "A CPU", "gpus": ["A GPU, 1.2"], "versions": {"octavo": "0.1", "torch": "2"}}


def record(folder: Path, kind: str, result: dict[str, Any]) -> Path:
    file = folder / f"{kind}.json"
    values = {"benchmark": kind, "date": "2026-01-02", "command": f"octavo bench {kind}", "machine": MACHINE}
    file.write_text(json.dumps({**values, "result": result}))
    return file


def test_numbers() -> None:
    shown = [number(value) for value in (0.12345, 12.345, 1234.56, 12345, "W1", True, {"median": 2.5, "runs": 3})]
    assert shown == ["0.1235", "12.35", "1,235", "12,345", "W1", "True", "2.5"]


def test_plain_rows(tmp_path: Path) -> None:
    rows = [{"batch": 1, "us": {"median": 2.0, "min": 1.0}, "pairs": [1], "more": {"a": 1}}]
    text = render(record(tmp_path, "kernels", {"rows": rows}))
    assert text.startswith("`octavo bench kernels`, 2026-01-02, A GPU, 1.2; octavo 0.1, torch 2\n")
    assert text.endswith("| batch | µs |\n| --- | --- |\n| 1 | 2 |")


def test_every_shipped_record_has_a_table() -> None:
    for path in sorted((ROOT / "benchmarks/results").glob("**/*.json")):
        if '"result": {' not in path.read_text():
            continue
        text = render(path)
        tables = [line for line in text.splitlines() if line.startswith("| ---")]
        assert tables, path
        assert "|  |\n| --- |" not in text, path
        assert len(text.splitlines()) >= 5, path


def test_sections_have_tables_of_their_own() -> None:
    text = render(ROOT / "benchmarks/results/fairness.json")
    assert "short prompts:\n\n| policy | quiet TTFT (ms) | quiet tokens/s |" in text
    assert "long prompts:\n\n| policy |" in text
    assert "| llmc-fp8 | - | 14.527 |" in render(ROOT / "benchmarks/results/quality_cpu_transformers.json")
    assert "| 5,632 |" in render(ROOT / "benchmarks/results/limit_cpu.json").split("| longest context (tokens) |")[1]


def test_served(tmp_path: Path) -> None:
    figures = ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_p50_ms")
    both = {"octavo": {"median": 3.0, "all": [3.0, 3.0]}, "vllm": {"median": 2.0, "all": [2.0]}, "times_better": 1.5}
    rows: list[dict[str, Any]] = [{"workload": "W1", "figure": name, **both} for name in figures]
    del rows[1]["vllm"], rows[1]["times_better"]
    visits = [{"engine": "octavo", "ready_s": 12.5}, {"engine": "vllm", "error": "it\nbroke"}]
    text = render(record(tmp_path, "peer", {"workloads": {"W1": {}}, "rows": rows, "visits": visits}))
    assert "| W1 | 3, 2 (1.50) | 3, - | 3, 2 (1.50) |" in text
    assert "| 2/1 |" in text
    assert "| vllm | - | it broke |" in text


def test_formats_of_weights(tmp_path: Path) -> None:
    row = {"format": "int8", "weights_bytes": 3 << 20, "perplexity": 12.3456, "mean_kl": 0.00123, "p99_kl": 0.01}
    rows = [
        {**row, "same_top_token": 0.987},
        {**row, "same_top_token": 1.0, "decode_tok_s": {"median": 40.0, "max": 50.25}},
    ]
    text = render(record(tmp_path, "quality", {"rows": rows}))
    assert "| int8 | 3.0 | 12.346 | 0.00123 | 0.01 | 98.7 | - |" in text
    assert "| 100.0 | 50.25 |" in text


def test_a_latency_of_the_client_has_no_ratio(tmp_path: Path) -> None:
    rows = [
        {
            "workload": "W4",
            "figure": name,
            "octavo": {"median": ours},
            "vllm": {"median": 8.0},
            "times_better": 8 / ours,
        }
        for name, ours in (("itl_p50_ms", 0.006), ("itl_p99_ms", 4.0))
    ]
    text = render(record(tmp_path, "peer", {"workloads": {"W4": {}}, "rows": rows, "visits": []}))
    assert "| W4 | 0.006, 8 | 4, 8 (2.00) |" in text


def test_a_page_is_filled_where_it_says(tmp_path: Path) -> None:
    there = record(tmp_path, "throughput", {"output_tok_s": 5})
    page = tmp_path / "page.md"
    places = "".join(
        f"# {file.name}\n<!-- report {file} -->\nold\n<!-- end -->\n" for file in (there, Path("none.json"))
    )
    page.write_text(places)
    assert fill(page) == [Path("none.json")]
    assert page.read_text() == places.replace("old", render(there), 1)
    filled = page.read_text()
    fill(page)
    assert page.read_text() == filled, "filling again changes nothing"


@pytest.mark.parametrize("name", ["benchmarks.md", "performance.md"])
def test_the_tables_of_the_notes_are_those_of_the_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "benchmarks" / "notes" / name).read_text()
    copy = tmp_path / name
    copy.write_text(page)
    assert fill(copy) == [], "a place without a record"
    assert copy.read_text() == page, f"octavo bench report --fill benchmarks/notes/{name}"


def test_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "missing.json"):
        with pytest.raises(ConfigError, match="not a record"):
            render(tmp_path / name)
