"""Plots of records: throughput against latency for the loads of ``bench serve``, bars for everything else."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo_bench import first_minute
from octavo_bench.gpu_watch import GpuWatch, gpus
from octavo_bench.plot_style import COLOURS, GREY, drawing
from octavo_bench.record_figures import OWN, Figure, figures
from octavo_bench.report_tables import number

MAX_PANELS = 4
MAX_BARS = 40
"""Of a panel; what comes later is left out, and the title says so."""
TRACED = {"utilization_percent": "utilisation, %", "memory_mib": "memory in use, MiB", "power_w": "power, W"}
"""Figures of a GPU that are drawn over time."""
LATENCIES = {"ttft": "time to first token, ms", "tpot": "time per output token, ms"}


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the plot of a record as SVG or PNG. Raises ``ConfigError`` if there is nothing to draw."""
    if record["benchmark"] == "serve" and len(record["result"]["rows"]) > 1:
        _loads(record, path)
    elif record["benchmark"] == "first-minute":
        first_minute.draw(record["result"], _note(record), path)
    else:
        _bars(record, path)


def _note(record: Mapping[str, Any]) -> str:
    machine = record.get("machine", {})
    device = "; ".join(machine.get("gpus") or [machine.get("processor", "")])
    return textwrap.shorten(f"{record.get('date', '')}, {device}: {record.get('command', '')}", 150)


def _loads(record: Mapping[str, Any], path: Path) -> None:
    """A panel for each latency: its percentiles over the throughput, one point for each load."""
    result = record["result"]
    rows = result["rows"]
    panels = [name for name in LATENCIES if all(f"{name}_mean_ms" in row for row in rows)]
    kind = "concurrency" if rows[0]["load"].startswith("concurrency") else "request rate"
    title = f"{result['model']}, workload {result['workload']}, by {kind}"
    with drawing(path, title, _note(record), 4.6 * len(panels), 3.8) as figure:
        for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            throughput = [row["output_tok_s"] for row in rows]
            columns = [column for column in rows[0] if column.startswith(f"{name}_p")]
            chosen = dict.fromkeys((columns[0], columns[-1])) if columns else [f"{name}_mean_ms"]
            for column, colour in zip(chosen, COLOURS, strict=False):
                label = column.split("_")[1]
                axes.plot(throughput, [row[column] for row in rows], "o-", color=colour, label=label)
            for x, row in zip(throughput, rows, strict=True):
                short = row["load"].removeprefix("concurrency ").removesuffix(" req/s")
                axes.annotate(
                    short, (x, row[next(iter(chosen))]), (3, -10), textcoords="offset points", fontsize=7, color=GREY
                )
            axes.set(xlabel="output tokens/s", ylabel=LATENCIES[name], yscale="log")
            axes.legend()


def _bars(record: Mapping[str, Any], path: Path) -> None:
    """A panel for each figure: a bar for each case and engine, with a line from the least round to the greatest."""
    found = figures(record)
    found = [figure for figure in found if not figure.is_ratio] or found
    by_name: dict[str, list[Figure]] = {}
    for figure in found:
        by_name.setdefault(figure.name, []).append(figure)
    several = {name: part for name, part in by_name.items() if len(part) > 1}
    panels = list((several or by_name).items())[:MAX_PANELS]
    if not panels:
        raise ConfigError(f"plot: a record of {record['benchmark']!r} has no figures to draw")
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    most = max(min(len(part), MAX_BARS) for _, part in panels)
    model = record["result"].get("model")
    title = f"octavo bench {record['benchmark']}" + (f": {model}" if isinstance(model, str) else "")
    with drawing(path, title, _note(record), 1.0 + 4.5 * columns, 0.6 + rows * (0.9 + 0.27 * most)) as figure:
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (name, part) in zip(places, panels, strict=False):
            _panel(axes, name, part)
        for axes in places[len(panels) :]:
            axes.set_visible(False)


def draw_gpus(watch: GpuWatch, path: Path) -> None:
    """Write a plot of the GPUs over time as SVG or PNG: utilisation, memory and power, a line for each GPU."""
    indices = sorted({sample.gpu for sample in watch.samples})
    with drawing(path, "GPUs during the measurement", "; ".join(gpus()), 4.6 * len(TRACED), 3.2) as figure:
        for axes, (name, label) in zip(figure.subplots(1, len(TRACED)), TRACED.items(), strict=True):
            for index in indices:
                own = [sample for sample in watch.samples if sample.gpu == index]
                seconds = [sample.time - watch.start for sample in own]
                colour = COLOURS[index % len(COLOURS)]
                axes.plot(seconds, [sample.figures[name] for sample in own], color=colour, label=f"GPU {index}")
            axes.set(xlabel="seconds", ylabel=label, ylim=(0, None))
        if len(indices) > 1:
            axes.legend()


def _panel(axes: Any, name: str, found: Sequence[Figure]) -> None:
    shown = found[:MAX_BARS]
    for place, figure in enumerate(shown):
        axes.barh(place, figure.value, color=COLOURS[0 if figure.engine in OWN else 1], height=0.7)
        if figure.high > figure.low:
            axes.plot([figure.low, figure.high], [place, place], color="black", linewidth=1)
        axes.annotate(number(figure.value), (figure.high, place), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), _labels(shown))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.18)
    left_out = f" (first {MAX_BARS} of {len(found)})" if len(found) > MAX_BARS else ""
    better = "more is better" if shown[0].is_higher_better else "less is better"
    axes.set(title=_title(name) + left_out, xlabel=better)


def _labels(found: Sequence[Figure]) -> list[str]:
    """The cases, without what is the same in all of them, and the engines."""
    parts = [figure.case.split(", ") for figure in found]
    common = set.intersection(*map(set, parts)) if len({figure.case for figure in found}) > 1 else set()
    labels = []
    for figure, own in zip(found, parts, strict=True):
        kept = [part for part in (*own, figure.engine) if part and part not in common]
        labels.append(textwrap.shorten(", ".join(kept), 48))
    return labels


def _title(name: str) -> str:
    """``output_tok_s`` as "output tokens/s"."""
    name = re.sub(r"_?(tok|requests)_s$", lambda found: f" {found[1].replace('tok', 'tokens')}/s", name)
    return re.sub(r"_(ms|us|s)$", r" (\1)", name).replace("_", " ").strip()
