"""The pages on performance name commands and settings that exist, and figures that are in the records."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from octavo.cli import build_parser
from octavo_bench.records.report_tables import number, render

DOCS = Path(__file__).parents[2] / "docs"
NOTES = DOCS.parent / "benchmarks" / "notes"
COMPARISONS = NOTES / "comparisons.md"
PAGES = ("benchmarks.md", "performance.md")
FIGURES = {
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "ITL p99 ms": "itl_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "mJ per token": "mj_per_token",
}
RECORD = re.compile(r"\((\.\./results/\S+\.json)\)")


def examples(page: str) -> list[str]:
    """Every `octavo bench` command of a page that has arguments or stands alone in its line."""
    text = (DOCS / page).read_text()
    indented = re.findall(r"^ {4}(?:\w+=\S+ )?(octavo bench .+)$", text, re.MULTILINE)
    in_cells = re.findall(r"\| `(octavo bench [^`]+)` \|", text)
    return [*indented, *in_cells]


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]


def as_shown(files: list[str], workload: str, figure: str) -> str:
    """Both medians, of one record or of one for each engine, and how many times better Octavo's is.

    "-" where runs were too short for it, and in place of an engine that has no run.
    """
    medians: dict[str, float] = {}
    told = None
    for file in files:
        for row in json.loads((NOTES / file).read_text())["result"]["rows"]:
            if (row["workload"], row["figure"]) == (workload, figure):
                medians |= {engine: row[engine]["median"] for engine in ("octavo", "vllm") if engine in row}
                told = row.get("times_better", told)
    if not medians:
        return "-"
    shown = " / ".join(number(medians[engine]) if engine in medians else "-" for engine in ("octavo", "vllm"))
    if len(medians) < 2:
        return shown
    ratio = medians["octavo"] / medians["vllm"]
    better = told or (ratio if figure.endswith("_tok_s") else 1 / ratio)
    return f"{shown} ({better:.2f})"


SEVERAL_GPUS = re.compile("_[et]p[24]")


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    commands = examples(page)
    assert len(commands) >= 5
    parser = build_parser()
    for command in commands:
        parser.parse_args(shlex.split(command, comments=True)[1:])


def test_every_measurement_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        build_parser("bench").parse_args(["bench", "--help"])
    kinds = set(re.findall(r"^ {4}([\w-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE))
    assert len(kinds) > 15
    assert kinds == {command.split()[2] for command in examples("benchmarks.md")}


def test_settings_exist(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"`(--[a-z-]+)", (DOCS / "tuning.md").read_text()))
    with pytest.raises(SystemExit, match=r"^0$"):
        build_parser("serve").parse_args(["serve", "--help=all"])
    assert len(named) >= 8
    assert named <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def test_throughput_is_that_of_the_records() -> None:
    lines = COMPARISONS.read_text().splitlines()
    rows = [line for line in lines if "/peer_" in line and not SEVERAL_GPUS.search(line) and line[0] == "|"]
    assert len(rows) == 16
    for line in rows:
        files = RECORD.findall(line)
        assert cells(line)[2:] == [as_shown(files, f"W{n}", "output_tok_s") for n in (1, 2, 3, 4)]
    rows = [line for line in lines if "4_h200.json" in line and line[0] == "|"]
    assert len(rows) == 4
    for line in rows:
        assert cells(line)[1:4] == [as_shown(RECORD.findall(line), f"W{n}", "output_tok_s") for n in (1, 2, 3)]


def test_figures_of_two_gpus_are_those_of_the_records() -> None:
    text = COMPARISONS.read_text()
    section = text[text.index("### Two GPUs") : text.index("## CPU: next to")]
    parts = section.split("\n\n")
    tables = [
        (RECORD.findall(told)[:2], part) for told, part in itertools.pairwise(parts) if part.startswith("| | W1 |")
    ]
    assert len(tables) == 2
    for files, table in tables:
        for title, figure in {"output tokens/s, Octavo / vLLM": "output_tok_s", **FIGURES}.items():
            for line in [line for line in table.splitlines() if line.startswith(f"| {title} |")]:
                assert cells(line)[1:] == [as_shown(files, f"W{n}", figure) for n in (1, 2, 3, 4)]


def test_figures_of_larger_models_on_two_gpus_are_those_of_the_records() -> None:
    lines = COMPARISONS.read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and "_tp2" in line]
    assert len(rows) == 2
    for line in rows:
        assert cells(line)[1:] == [as_shown(RECORD.findall(line), f"W{n}", "output_tok_s") for n in (1, 2, 3)]


def test_latency_is_that_of_the_record() -> None:
    lines = COMPARISONS.read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| workload | TTFT"))
    file = RECORD.findall(lines[start - 2])[0]
    titles = cells(lines[start])[1:]
    for line in lines[start + 2 : start + 6]:
        workload, *shown = cells(line)
        assert shown == [as_shown([file], workload, FIGURES[title]) for title in titles]


def test_the_summary_has_the_range_of_the_plotted_figures() -> None:
    draw = runpy.run_path(str(DOCS / "performance" / "draw.py"))
    lines, page = list(draw["of_gpus"]()), (DOCS / "performance.md").read_text()
    assert len(lines) == 14
    found = {
        name: [times for line in lines for (own, _), times in line.times.items() if own == name]
        for name in draw["PANELS"]
    }
    tokens, first, gaps = found.values()
    assert f"is ahead in each of these, by {min(tokens):.2f} to {max(tokens):.2f} times" in page
    assert f"comes {min(first):.2f} to {max(first):.2f} times as early" in page
    assert [sum(times < 1 for times in gaps), len(gaps)] == [5, 53]
    assert "but for five of the 53" in page
    assert all(times > 1 for line in draw["of_cpus"]() for times in line.times.values())


def test_figures_of_formats_are_those_of_the_records() -> None:
    page, results = (DOCS / "quantization.md").read_text(), DOCS.parent / "benchmarks" / "results"
    assert render(results / "quality_cpu.json") in page
    ours, theirs = (
        {row["format"]: row["mean_kl"] for row in json.loads((results / name).read_text())["result"]["rows"]}
        for name in ("quality_cpu.json", "quality_cpu_transformers.json")
    )
    for name, figure in theirs.items():
        assert f"| `{name}` | {number(ours[name])} | {number(figure)} |" in page


def test_the_modules_that_pages_name_are_there() -> None:
    root = DOCS.parent
    modules = {f"/{path.relative_to(root)}" for path in root.glob("*/**/*.py") if path.parts[len(root.parts)][0] != "."}
    pages = [root / "README.md", *DOCS.rglob("*.md")]
    named = {
        (page.name, name)
        for page in pages
        if page.name != "clients.md"  # has those of other projects
        for name in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())
        if "NAME" not in name
    }
    assert len(named) > 100
    assert [at for at in sorted(named) if not any(module.endswith("/" + at[1]) for module in modules)] == []


def test_what_shows_the_features_of_other_projects_exists() -> None:
    root, text = DOCS.parent, (DOCS / "seeds.md").read_text()
    paths = re.findall(r"`((?:tests|octavo|deploy|docs)/[^` ]*|\.github/[^`]*)`", text)
    assert len(paths) > 50
    assert [path for path in paths if not (root / path).exists()] == []
    functions = set(re.findall(r"`(test_\w+)`", text))
    written = set(re.findall(r"def (test_\w+)", "".join(file.read_text() for file in root.glob("tests/**/test_*.py"))))
    assert len(functions) > 5
    assert functions <= written


def test_the_commands_for_the_features_of_other_projects_parse() -> None:
    commands = re.findall(r"`(octavo bench [a-z-]+ [^`]+)`", (DOCS / "seeds.md").read_text())
    assert len(commands) > 10
    parser = build_parser()
    for command in commands:
        parser.parse_args(shlex.split(command)[1:])
