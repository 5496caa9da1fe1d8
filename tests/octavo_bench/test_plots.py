"""`--plot`: what is drawn is what the record says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo_bench.records import plot_style
from octavo_bench.records.gate import read_record
from octavo_bench.records.plots import draw
from octavo_bench.records.record_figures import figures

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LOADS = {
    "benchmark": "serve",
    "command": "octavo bench serve URL",
    "result": {
        "model": "tiny",
        "workload": "fixed",
        "num_prompts": 8,
        "rows": [
            {
                "load": f"concurrency {count}",
                "output_tok_s": 10.0 * count,
                "completed": 8 - count,
                "failed": count,
                **{f"{name}_{part}_ms": count + 1.0 for name in ("ttft", "tpot") for part in ("mean", "p50", "p99")},
            }
            for count in (1, 2, 4)
        ],
    },
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved, which takes seconds."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    found: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: found.append(self))
    return found


def test_loads_are_drawn_over_the_throughput(drawn: list[Any], tmp_path: Path) -> None:
    draw(LOADS, tmp_path / "loads.svg")
    *latencies, requests = drawn[0].axes
    assert len(latencies) == 2
    for axes in latencies:
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["p50", "p99"]
        assert list(lines["p99"].get_xdata()) == [10.0, 20.0, 40.0]
        assert list(lines["p99"].get_ydata()) == [2.0, 3.0, 5.0]
        assert [text.get_text() for text in axes.texts] == ["1", "2", "4"]
    assert [bar.get_height() for bar in requests.patches] == [7, 6, 4, 1, 2, 4], "answered, and failed above them"


def panels_of(name: str, drawn: list[Any], tmp_path: Path) -> dict[str, Any]:
    draw(read_record(RESULTS / f"{name}.json"), tmp_path / "plot.svg")
    return {axes.get_title(loc="left").replace("\n", " "): axes for axes in drawn[-1].axes if axes.get_visible()}


def test_kernels_have_a_line_each_with_a_dot_for_each_number_of_rows(drawn: list[Any], tmp_path: Path) -> None:
    kernels = [("linear", "qkv", 1), ("linear", "qkv", 16), ("head", "lm_head", 1), ("head", "lm_head", 16)]
    rows = [
        {"family": family, "kernel": kernel, "format": "bf16", "model": "m", "T": T, "of_floor": 1 / (i + 1)}
        for i, (family, kernel, T) in enumerate(kernels)
    ]
    del rows[-1]["of_floor"]
    draw({"benchmark": "kernels", "result": {"rows": rows}}, tmp_path / "kernels.svg")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "linear: qkv, bf16 (m)",
        "head: lm_head, bf16 (m)",
    ]
    dots = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert dots == {"1 row": ([1.0, 1 / 3], [0, 1]), "16 rows": ([0.5], [0])}


def test_figures_over_a_quantity_are_lines(drawn: list[Any], tmp_path: Path) -> None:
    record = read_record(RESULTS / "cpu_peer_llama_cpp.json")
    panels = panels_of("cpu_peer_llama_cpp", drawn, tmp_path)
    assert list(panels) == ["prefill tokens/s", "decode tokens/s"]
    lines = {line.get_label(): line for line in panels["decode tokens/s"].lines if line.get_label()[0] != "_"}
    for engine, line in lines.items():
        own = [one.value for one in figures(record) if (one.name, one.engine) == ("decode_tok_s", engine)]
        assert list(line.get_ydata()) == own
        assert list(line.get_xdata()) == [1, 4, 16]
    assert list(lines) == ["octavo", "peer"]
    assert panels["decode tokens/s"].get_xlabel() == "sequences (more is better)"


def test_what_is_compared_has_one_scale(drawn: list[Any], tmp_path: Path) -> None:
    panels = panels_of("recompute_cpu", drawn, tmp_path)
    lines = [line.get_label() for line in panels["time of a token (ms)"].lines]
    assert [label for label in lines if label[0] != "_"] == ["cached", "recomputed"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gpu/gpt2_suites", ["continuous tokens/s", "pressure tokens/s", "http tokens/s, short", "http latency (ms)"]),
        ("ablation_cpu", ["output tokens/s", "TTFT (ms)", "ITL (ms)", "same tokens (share)"]),
        ("sweep_block_size_cpu", ["most used blocks", "empty slots (%)", "output tokens/s"]),
        ("gpu/profile_qwen3-8b", ["us by class (µs)", "idle (%), decode", "idle (%), prefill"]),
    ],
)
def test_no_figure_is_left_out(name: str, shown: list[str], drawn: list[Any], tmp_path: Path) -> None:
    panels = panels_of(name, drawn, tmp_path)
    assert set(shown) <= panels.keys()
    if name == "ablation_cpu":
        labels = [label.get_text() for label in panels["ITL (ms)"].get_yticklabels()]
        assert labels[:2] == ["static batches, median", "static batches, p99"]
    if name == "sweep_block_size_cpu":
        assert "0 in all cases: preemptions (requests)" in drawn[0].get_supxlabel().replace("\n", " ")


def test_what_failed_is_drawn(drawn: list[Any], tmp_path: Path) -> None:
    memory = panels_of("limit_cpu", drawn, tmp_path)["peak memory (MiB)"]
    failed = next(line for line in memory.lines if line.get_label() == "failed")
    assert list(failed.get_xdata()) == [5888, 6144, 8192]


def test_bars_have_their_medians_at_their_ends(drawn: list[Any], tmp_path: Path) -> None:
    axes = panels_of("ablation_cpu", drawn, tmp_path)["output tokens/s"]
    assert [text.xy[0] for text in axes.texts] == [bar.get_width() for bar in axes.patches]
    assert len(axes.lines) == 9, "from the least round to the greatest"


def test_files_are_the_same_when_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    file = RESULTS / "startup.json"
    assert main(["bench", "report", str(file), "--plot", str(first)]) == 0
    draw(json.loads(file.read_text()), second)
    assert first.read_bytes() == second.read_bytes()
    assert b"first answer" in first.read_bytes(), "text is text, which can be searched"
    draw(LOADS, tmp_path / "new" / "folder.png")
    assert (tmp_path / "new" / "folder.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_without_figures_is_named(tmp_path: Path, drawn: list[Any]) -> None:
    with pytest.raises(ConfigError, match="'fidelity' has no figures to draw"):
        draw({"benchmark": "fidelity", "result": {"rows": [{"workload": "one"}]}}, tmp_path / "none.svg")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"needs matplotlib; `pip install 'octavo\[plots\]'` installs it"):
        plot_style.check_plot(tmp_path / "plot.svg")
