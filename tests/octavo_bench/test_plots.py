"""`--plot`: what is drawn is what the record says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo_bench import plot_style
from octavo_bench.gate import read_record
from octavo_bench.plots import draw
from octavo_bench.record_figures import figures

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
                **{f"{name}_{part}_ms": count + 1.0 for name in ("ttft", "tpot") for part in ("mean", "p50", "p99")},
            }
            for count in (1, 2, 4)
        ],
    },
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    found: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: found.append(self) or save(self, *args, **more))
    return found


def test_loads_are_drawn_over_the_throughput(drawn: list[Any], tmp_path: Path) -> None:
    draw(LOADS, tmp_path / "loads.svg")
    assert len(drawn[0].axes) == 2
    for axes in drawn[0].axes:
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["p50", "p99"]
        assert list(lines["p99"].get_xdata()) == [10.0, 20.0, 40.0]
        assert list(lines["p99"].get_ydata()) == [2.0, 3.0, 5.0]
        assert [text.get_text() for text in axes.texts] == ["1", "2", "4"]


def test_bars_are_the_figures(drawn: list[Any], tmp_path: Path) -> None:
    record = read_record(RESULTS / "cpu_peer_llama_cpp.json")
    draw(record, tmp_path / "bars.svg")
    panels = {axes.get_title(loc="left"): axes for axes in drawn[0].axes}
    assert list(panels) == ["prefill tokens/s", "decode tokens/s"]
    decode = panels["decode tokens/s"]
    expected = [figure.value for figure in figures(record) if figure.name == "decode_tok_s"]
    assert [bar.get_width() for bar in decode.patches] == expected
    assert [label.get_text() for label in decode.get_yticklabels()][:2] == ["sequences 1, octavo", "sequences 1, peer"]
    assert len({bar.get_facecolor() for bar in decode.patches}) == 2


def test_files_are_the_same_when_drawn_again(tmp_path: Path, drawn: list[Any]) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    file = RESULTS / "startup.json"
    assert main(["bench", "report", str(file), "--plot", str(first)]) == 0
    draw(json.loads(file.read_text()), second)
    assert first.read_bytes() == second.read_bytes()
    assert b"first answer (s)" in first.read_bytes(), "text is text, which can be searched"
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
