"""Plots of records: throughput against latency for the loads of ``bench serve``; else a panel for each figure.

A panel has lines where one quantity varies, such as a length or a batch, and bars where cases are kinds. What is
compared, engines or statistics of one figure, shares a panel and so its scale.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo_bench.records.figure_table import STATISTIC, meaning, title
from octavo_bench.records.gpu_watch import GpuWatch, gpus
from octavo_bench.records.plot_style import COLOURS, GREY, drawing, legend
from octavo_bench.records.record_figures import OWN, Figure, figures, rows_of
from octavo_bench.records.report_tables import number

MAX_BARS = 40
"""Of a panel; what comes later is left out, and the title says so."""
MAX_LINES = 8
"""Of a panel; more are divided among several."""
TOGETHER = {
    **dict.fromkeys(("cached_ms", "recomputed_ms"), "time of a token (ms)"),
    **dict.fromkeys(("cached_tok_s", "recomputed_tok_s"), "a whole answer, tokens/s"),
    **dict.fromkeys(("plain_tok_s", "drafts_tok_s"), "output tokens/s, without and with drafts"),
    **dict.fromkeys(("in_process_tok_s", "served_tok_s"), "output tokens/s, in process and served"),
    **dict.fromkeys(("answer_asleep", "answer_awake", "fall_asleep"), "times of a switch (s)"),
    **dict.fromkeys(("octavo", "octavo_without_peer_access", "nccl", "torch_one_shot", "torch_two_shot"), "time (µs)"),
    **dict.fromkeys(("octavo_small", "octavo_one_shot", "octavo_two_shot"), "time (µs)"),
    **dict.fromkeys(("cublas_and_kernels_us", "cublas_products_us", "microseconds"), "time (µs)"),
}
"""Figures of different names that are compared, by the title of their panel."""
UNITS = {
    "s": "times (s)",
    "ms": "times (ms)",
    "µs": "times (µs)",
    "share": "shares",
    "": "others",
    "MiB": "memory (MiB)",
}
"""Titles of panels of single figures."""
STACKED = ("us_by_class",)
"""Parts of a sum."""
TRACED = {"utilization_percent": "utilisation, %", "memory_mib": "memory in use, MiB", "power_w": "power, W"}
"""Figures of a GPU that are drawn over time."""
LATENCIES = {"ttft": "time to first token, ms", "tpot": "time per output token, ms"}
FAILED = "#c0392b"


class Panel(NamedTuple):
    """What is drawn on one pair of axes."""

    title: str
    found: Sequence[Figure]
    quantity: str | None
    """The name of what varies along the horizontal axis; ``None`` for bars."""

    @property
    def inches(self) -> float:
        return 2.7 if self.quantity else 0.9 + 0.27 * min(len(self.found), MAX_BARS)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the plot of a record as SVG or PNG. Raises ``ConfigError`` if there is nothing to draw."""
    rows = record["result"].get("rows", [])
    if record["benchmark"] == "serve" and len(rows) > 1 and "workload" not in rows[0]:
        _loads(record, path)
    elif record["benchmark"] == "first-minute":
        _first_minute(record, path)
    elif any("of_floor" in row for row in rows):
        _shares_of_floors(record, path)
    else:
        _all(record, path)


def _note(record: Mapping[str, Any]) -> str:
    machine = record.get("machine", {})
    device = "; ".join(machine.get("gpus") or [machine.get("processor", "")])
    return f"{record.get('date', '')}, {device}: {record.get('command', '')}"


def _first_minute(record: Mapping[str, Any], path: Path) -> None:
    """Throughput and the 99th percentile of the time between tokens by second, a line for each engine."""
    result = record["result"]
    with drawing(path, f"{result['model']}: the first minute after a start", _note(record), 8.0, 5.0) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        for row, colour in zip(result["rows"], COLOURS, strict=False):
            label = f"{row['case']}, ready after {row['ready_s']:.0f} s"
            seconds = [point["second"] + 0.5 for point in row["by_second"]]
            above.plot(seconds, [point["tokens"] for point in row["by_second"]], color=colour, label=label)
            below.plot(seconds, [point["itl_p99"] for point in row["by_second"]], color=colour)
        above.set(ylabel="output tokens/s", ylim=(0, None))
        below.set(xlabel="seconds since the server was ready", ylabel="ITL, 99th percentile, ms", yscale="log")
        above.legend()


def _shares_of_floors(record: Mapping[str, Any], path: Path) -> None:
    """The least possible time of each kernel over its time: a line for each, and a dot for each number of rows."""
    rows = [row for row in record["result"]["rows"] if "of_floor" in row]
    names = [f"{row['family']}: {row['kernel']}, {row['format']} ({row['model']})" for row in rows]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    with drawing(path, "Share of the floor, by kernel", _note(record), 9.0, 1.6 + 0.17 * len(places)) as figure:
        axes = figure.subplots()
        counts = sorted({row["T"] for row in rows})
        for T, colour in zip(counts, itertools.cycle(COLOURS)):
            dots = [(row["of_floor"], places[name]) for row, name in zip(rows, names, strict=True) if row["T"] == T]
            axes.plot(*zip(*dots, strict=True), "o", color=colour, label=f"{T} row{'s' * (T > 1)}", clip_on=False)
        axes.set_yticks(range(len(places)), list(places), fontsize=7)
        axes.set(xlabel="share of the floor", xlim=(0, None), ylim=(len(places) - 0.4, -0.6))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(counts))


def _loads(record: Mapping[str, Any], path: Path) -> None:
    """A panel for each latency: its percentiles over the throughput, one point for each load; and what failed."""
    result = record["result"]
    rows = result["rows"]
    latencies = [name for name in LATENCIES if all(f"{name}_mean_ms" in row for row in rows)]
    kind = "concurrency" if rows[0]["load"].startswith("concurrency") else "request rate"
    heading = f"{result['model']}, workload {result['workload']}, by {kind}"
    loads = [row["load"].removeprefix("concurrency ").removesuffix(" req/s") for row in rows]
    with drawing(path, heading, _note(record), 4.2 * (len(latencies) + 1), 3.8) as figure:
        *places, last = figure.subplots(1, len(latencies) + 1, squeeze=False)[0]
        for axes, name in zip(places, latencies, strict=True):
            throughput = [row["output_tok_s"] for row in rows]
            columns = [column for column in rows[0] if column.startswith(f"{name}_p")]
            chosen = dict.fromkeys((columns[0], columns[-1])) if columns else [f"{name}_mean_ms"]
            for column, colour in zip(chosen, COLOURS, strict=False):
                label = column.split("_")[1]
                axes.plot(throughput, [row[column] for row in rows], "o-", color=colour, label=label)
            for x, row, load in zip(throughput, rows, loads, strict=True):
                axes.annotate(
                    load, (x, row[next(iter(chosen))]), (3, -10), textcoords="offset points", fontsize=7, color=GREY
                )
            axes.set(xlabel=f"output tokens/s; points are {kind}", ylabel=LATENCIES[name], yscale="log")
            axes.legend()
        counts = {name: [row.get(name, 0) for row in rows] for name in ("completed", "failed")}
        last.bar(loads, counts["completed"], color=COLOURS[0], label="answered")
        last.bar(loads, counts["failed"], bottom=counts["completed"], color=FAILED, label="failed")
        last.set(xlabel=kind, ylabel="requests", ylim=(0, 1.3 * max(map(sum, zip(*counts.values(), strict=True)))))
        legend(last, 2)


def _all(record: Mapping[str, Any], path: Path) -> None:
    """Every figure; those that are 0 in all cases are named below."""
    found = figures(record)
    found = [figure for figure in found if not figure.is_ratio] or found
    nothing = {figure.name for figure in found} - {figure.name for figure in found if figure.value or figure.high}
    panels = list(_panels([figure for figure in found if figure.name not in nothing]))
    if not panels:
        raise ConfigError(f"plot: a record of {record['benchmark']!r} has no figures to draw")
    columns = min(len(panels), 2 if len(panels) < 5 else 3)
    lines = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(panel.inches for panel in line) for line in lines]
    model = record["result"].get("model")
    heading = f"octavo bench {record['benchmark']}" + (f": {model}" if isinstance(model, str) else "")
    zero = f". 0 in all cases: {', '.join(sorted(map(title, nothing)))}" if nothing else ""
    with drawing(path, heading, _note(record) + zero, 1.0 + 4.5 * columns, 0.9 + sum(heights)) as figure:
        grid = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
        for index, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
            if panel.quantity is None:
                _bars(axes, panel, round((heights[index // columns] - 0.9) / 0.27))
            else:
                _lines(axes, panel, list(_failures(record, panel.quantity)))
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)


def _panels(found: Sequence[Figure]) -> Iterator[Panel]:
    """Figures that are compared together; single ones of a unit, too."""
    groups: dict[str, list[Figure]] = {}
    for figure in found:
        name = TOGETHER.get(figure.name) or title(STATISTIC.sub("", figure.name))
        groups.setdefault(name, []).append(figure)
    singles: dict[str, list[Figure]] = {}
    for name, part in groups.items():
        if len(part) == 1:
            singles.setdefault(meaning(part[0].name).unit, []).append(part[0])
        else:
            yield from _divided(name, part)
    for unit, part in singles.items():
        yield Panel(title(part[0].name) if len(part) == 1 else UNITS.get(unit, unit), part, None)


def _divided(name: str, found: Sequence[Figure]) -> Iterator[Panel]:
    """Bars, or lines: these in a panel for each value of the first kind that varies, until none is a single point."""
    quantity = None if found[0].name in STACKED else _quantity(found)
    kinds = [kind for kind in _varying(found) if kind != quantity]
    lines = _series(found, quantity)
    words = [kind for kind in kinds if isinstance(dict(found[0].given).get(kind), str)]
    if quantity is not None and words and any(len(points) == 1 for points in lines.values()):
        kind = words[0]
    elif quantity is not None and kinds and len(lines) > MAX_LINES:
        kind = kinds[0]
    else:
        yield Panel(name, found, quantity)
        return
    for value in dict.fromkeys(dict(figure.given).get(kind) for figure in found):
        own = [figure for figure in found if dict(figure.given).get(kind) == value]
        yield from _divided(f"{name}, {value if isinstance(value, str) else f'{kind} {value}'}", own)


def _varying(found: Sequence[Figure]) -> list[str]:
    values: dict[str, set[float | str]] = {}
    for figure in found:
        for name, value in figure.given:
            values.setdefault(name, set()).add(value)
    return [name for name, own in values.items() if len(own) > 1]


def _quantity(found: Sequence[Figure]) -> str | None:
    """The number that takes most values; ``None`` if nothing does, or some cases have none."""
    numbers: dict[str, set[float]] = {}
    for figure in found:
        for name, value in figure.given:
            if not isinstance(value, str):
                numbers.setdefault(name, set()).add(value)
    name = max(numbers, key=lambda name: len(numbers[name]), default="")
    if len(numbers.get(name, ())) < 2 or any(name not in dict(figure.given) for figure in found):
        return None
    return name


def _series(found: Sequence[Figure], quantity: str | None) -> dict[str, list[Figure]]:
    """The figures of each line, or bar's colour, by what they do not all share."""
    kinds = [kind for kind in _varying(found) if kind != quantity]
    names = len({STATISTIC.sub("", figure.name) for figure in found}) > 1
    several = len({figure.name for figure in found}) > 1
    lines: dict[str, list[Figure]] = {}
    for figure in found:
        given = dict(figure.given)
        parts = [
            str(given[kind]) if isinstance(given[kind], str) else f"{kind} {given[kind]}"
            for kind in kinds
            if kind in given
        ]
        if len({one.engine for one in found}) > 1:
            parts.append(figure.engine or "octavo")
        if names:
            parts.append(title(figure.name).partition(" (")[0])
        elif several:
            parts += [match.strip("_") for match in STATISTIC.findall(figure.name)] or ["median"]
        lines.setdefault(", ".join(parts), []).append(figure)
    return lines


def _failures(record: Mapping[str, Any], quantity: str) -> Iterator[float]:
    """Where rows say that they failed."""
    for _, row in rows_of(record["result"]):
        if isinstance(row.get("failed"), str) and row["failed"] and quantity in row:
            yield row[quantity]


def _lines(axes: Any, panel: Panel, failed: Sequence[float]) -> None:
    quantity = panel.quantity
    assert quantity is not None
    lines = _series(panel.found, quantity)
    places = sorted({*failed, *(float(dict(figure.given)[quantity]) for figure in panel.found)})
    for number_, (label, found) in enumerate(lines.items()):
        colour = COLOURS[number_ % len(COLOURS)]
        points = sorted((float(dict(figure.given)[quantity]), figure) for figure in found)
        axes.plot([x for x, _ in points], [one.value for _, one in points], "o-", color=colour, label=label)
        for x, one in points:
            if one.high > one.low:
                axes.plot([x, x], [one.low, one.high], color=colour, linewidth=1, alpha=0.6)
    values = [figure.value for figure in panel.found if figure.value > 0]
    if values and max(values) > 30 * min(values):
        axes.set_yscale("log")
    else:  # a round that met a pause leaves the axis
        top = min(max(figure.high for figure in panel.found), 2 * max(values, default=1.0)) or 1.0
        axes.set_ylim(min(0.0, *(figure.low for figure in panel.found)), 1.1 * top)
    if failed:
        axes.plot(failed, [axes.get_ylim()[0]] * len(failed), "x", color=FAILED, label="failed", clip_on=False)
    is_log = places[0] > 0 and places[-1] >= 8 * places[0]
    if is_log:
        axes.set_xscale("log")
    ticks = _apart(places, is_log)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    better = _better(panel.found)
    axes.set(title=_wrapped(panel.title), xlabel=quantity.replace("_", " ") + (f" ({better})" if better else ""))
    legend(axes, len(lines) + bool(failed))


def _apart(places: Sequence[float], is_log: bool) -> list[float]:
    """Those that have room for their labels."""
    at = [math.log(place) if is_log else place for place in places]
    least = (at[-1] - at[0]) / 9
    kept = [0]
    for index in range(1, len(at)):
        if at[index] - at[kept[-1]] >= least:
            kept.append(index)
    return [places[index] for index in kept]


def _bars(axes: Any, panel: Panel, room: int) -> None:
    """A bar for each case and engine, with a line below its median from the least round to the greatest.

    ``room``: how many bars of the usual height there is place for.
    """
    shown = panel.found[:MAX_BARS]
    if shown[0].name in STACKED:
        _stacks(axes, panel)
        return
    labels = _labels(shown)
    kinds = list(dict.fromkeys((figure.engine not in OWN, figure.name) for figure in shown))
    for place, figure in enumerate(shown):
        colour = COLOURS[kinds.index((figure.engine not in OWN, figure.name)) % len(COLOURS)]
        axes.barh(place, figure.value, color=colour, height=0.7)
        if figure.high > figure.low:
            axes.plot([figure.low, figure.high], [place + 0.27, place + 0.27], color="black", linewidth=1)
        axes.annotate(number(figure.value), (figure.value, place), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(max(room, len(shown)) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.25)
    axes.locator_params(axis="x", nbins=5)
    left_out = f" (first {MAX_BARS} of {len(panel.found)})" if len(panel.found) > MAX_BARS else ""
    axes.set(title=_wrapped(panel.title + left_out), xlabel=_better(shown))


def _stacks(axes: Any, panel: Panel) -> None:
    """A bar for each case, of its parts."""
    parts = list(dict.fromkeys(str(dict(figure.given)["part"]) for figure in panel.found))
    cases: dict[str, list[Figure]] = {}
    for figure in panel.found:
        cases.setdefault(figure.case.rpartition(", ")[0], []).append(figure)
    for place, found in enumerate(cases.values()):
        left = 0.0
        for figure in found:
            index = parts.index(str(dict(figure.given)["part"]))
            axes.barh(place, figure.value, left=left, color=COLOURS[index % len(COLOURS)], height=0.7)
            left += figure.value
    for index, part in enumerate(parts):
        axes.barh(0, 0, color=COLOURS[index % len(COLOURS)], label=part)
    axes.set_yticks(range(len(cases)), _without_common(list(cases)))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=5)
    axes.set(title=_wrapped(panel.title), xlabel=_better(panel.found))
    legend(axes, len(parts))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 44)


def _better(found: Sequence[Figure]) -> str:
    ways = {meaning(figure.name).better for figure in found}
    return {"more": "more is better", "less": "less is better"}.get(ways.pop(), "") if len(ways) == 1 else ""


def _labels(found: Sequence[Figure]) -> list[str]:
    """The cases, without what is the same in all of them, the engines, and the figures where they differ."""
    cases = _without_common([figure.case for figure in found])
    lines = {id(figure): label for label, own in _series(found, None).items() for figure in own}
    named = len({figure.name for figure in found}) > 1
    labels = []
    for figure, case in zip(found, cases, strict=True):
        last = lines[id(figure)].rpartition(", ")[2] if named else ""
        labels.append(textwrap.shorten(", ".join(part for part in (case, figure.engine, last) if part), 48))
    return labels


def _without_common(cases: Sequence[str]) -> list[str]:
    parts = [case.split(", ") for case in cases]
    common = set.intersection(*map(set, parts)) if len(set(cases)) > 1 else set()
    return [", ".join(part for part in own if part not in common).replace("_", " ") for own in parts]


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
        legend(axes, len(indices))
