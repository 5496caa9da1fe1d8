"""Raw records as Markdown tables, so that a page's figures are printed by a command and never typed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo_bench.records.figure_table import is_figure, title
from octavo_bench.records.record_figures import beside_measured, rows_of

SERVED_COLUMNS = {
    "output_tok_s": "output tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "goodput_requests_s": "goodput requests/s",
    "mj_per_token": "mJ per token",
}
ABLATION_COLUMNS = {
    "num_steps": "steps",
    "output_tok_s": "tokens/s",
    "ttft_ms": "TTFT p50 ms",
    "ttft_max_ms": "longest TTFT ms",
    "itl_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
}
LOAD_COLUMNS = {
    "requests_s": "requests/s",
    "output_tok_s": "output tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "e2el_p99_ms": "E2EL p99 ms",
    "goodput_requests_s": "goodput requests/s",
    "failed": "failed",
}
LEAST_MS = 0.05
"""A gap between tokens below this is that of a client that reads several tokens at once: their ratio says nothing."""
PLACE = re.compile(r"<!-- report (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def markdown_table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def render(file: Path) -> str:
    """The tables of one raw record; raise ``ConfigError`` for a file that is not one."""
    try:
        record = json.loads(file.read_text())
        result = record["result"]
        title = f"`{record['command']}`, {record['date']}, {_machine(record['machine'])}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not a record of `octavo bench`: {error}") from None
    show = _served if "visits" in result else TABLES.get(record["benchmark"], plain)
    return f"{title}\n\n{show(result)}"


def fill(page: Path) -> list[Path]:
    """Put the tables of each record into a page, between ``<!-- report FILE -->`` and ``<!-- end -->``.

    ``FILE`` is relative to the working directory. A place whose record is not there stays as it is; returns those.
    """
    missing: list[Path] = []

    def replace(found: re.Match[str]) -> str:
        file = Path(found[1])
        if file.is_file():
            return f"<!-- report {file} -->\n{render(file)}\n<!-- end -->"
        missing.append(file)
        return found[0]

    page.write_text(PLACE.sub(replace, page.read_text()))
    return missing


def _machine(machine: Mapping[str, Any]) -> str:
    versions = machine["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("octavo", "torch", "triton") if name in versions)
    return f"{'; '.join(machine.get('gpus') or [machine['processor']])}; {named}"


def number(value: object) -> str:
    """A figure with three to four significant digits; the median of a spread; "-" for none; anything else as it is."""
    if value is None:
        return "-"
    if isinstance(value, Mapping) and "median" in value:
        value = value["median"]
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _served(result: Mapping[str, Any]) -> str:
    """One row for each workload; cells are Octavo's median, vLLM's, and how many times better Octavo is."""
    cells = {(row["workload"], row["figure"]): row for row in result["rows"]}
    columns = {figure: title for figure, title in SERVED_COLUMNS.items() if any(told == figure for _, told in cells)}
    lines = []
    for workload in result["workloads"]:
        found = [cells.get((workload, figure), {}) for figure in columns]
        told: Mapping[str, Any] = next((row for row in found if row), {})
        runs = "/".join(str(len(told.get(engine, {}).get("all", []))) for engine in ("octavo", "vllm"))
        lines.append([workload, *map(_pair, found), runs])
    header = ["workload", *(f"{title}: Octavo, vLLM (times better)" for title in columns.values()), "runs"]
    visits = [
        [visit["engine"], number(visit.get("ready_s", "-")), visit.get("error", "")] for visit in result["visits"]
    ]
    notes = [[engine, ready, " ".join(error.split())[:200]] for engine, ready, error in visits]
    return markdown_table(header, lines) + "\n\n" + markdown_table(["visit", "ready after s", "what went wrong"], notes)


def _pair(row: Mapping[str, Any]) -> str:
    """Both medians and how many times better ours is: not of latencies too short to be the server's."""
    engines = [row.get(engine, {}).get("median", LEAST_MS) for engine in ("octavo", "vllm")]
    is_read_together = str(row.get("figure", "")).endswith("_ms") and min(engines) < LEAST_MS
    times = f" ({row['times_better']:.2f})" if "times_better" in row and not is_read_together else ""
    return ", ".join(number(row.get(engine, "-")) for engine in ("octavo", "vllm")) + times


def ablation(result: Mapping[str, Any]) -> str:
    """One row for each engine, which has what the rows above it have and one thing more."""
    lines, before = [], None
    for row in result["rows"]:
        speed = row["output_tok_s"]["median"]
        change = "" if before is None else f" ({100 * (speed / before - 1):+.0f} %)"
        cells = {name: number(row[name]) for name in ABLATION_COLUMNS}
        lines.append([row["stage"], *{**cells, "output_tok_s": cells["output_tok_s"] + change}.values()])
        before = speed
    missing = "".join(f"\n\nNot there: {name}, for {reason}." for name, reason in result["missing"].items())
    return markdown_table(["and all above", *ABLATION_COLUMNS.values()], lines) + missing


def formats(result: Mapping[str, Any]) -> str:
    """One row for each format of a model's weights."""
    rows = result["rows"]
    header = [
        "weights",
        "MiB",
        "perplexity",
        "mean KL",
        "99th percentile of KL",
        "same top-1 %",
        "decode tokens/s, fastest round",
    ]
    has_needles = any("needle_share" in row for row in rows)
    header += ["needles found %", "nats of needles"] if has_needles else []
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([row["format"], *["-"] * 5, row["failed"]])
            continue
        distances = number(row["mean_kl"]), number(row["p99_kl"]), f"{100 * row['same_top_token']:.1f}"
        size = f"{row['weights_bytes'] / 2**20:.1f}" if "weights_bytes" in row else "-"
        speed = number(row.get("decode_tok_s", {}).get("max"))
        needles = [f"{100 * row['needle_share']:.1f}", f"{row['needle_nats']:.4f}"] if has_needles else []
        lines.append([row["format"], size, f"{row['perplexity']:.3f}", *distances, speed, *needles])
    return markdown_table(header, lines)


def _loads(result: Mapping[str, Any]) -> str:
    """One row for each load on a server."""
    rows = result["rows"]
    columns = {name: title for name, title in LOAD_COLUMNS.items() if any(name in row for row in rows)}
    kinds = [name for name in ("workload", "load") if name in rows[0]]
    lines = [[*(row[kind] for kind in kinds), *(number(row.get(name, "-")) for name in columns)] for row in rows]
    return markdown_table([*kinds, *columns.values()], lines)


def _profile(result: Mapping[str, Any]) -> str:
    """One row for each shape of step: milliseconds of wall time and of device work, and microseconds by class."""
    classes = sorted({label for row in result["rows"] for label in row["us_by_class"]})
    header = ["step", "sequences", "tokens", "wall ms", "busy ms", "idle %", "inside %", "between %", "kernels"]
    header += ["least GB", "TB/s", *(f"{label} µs" for label in classes)]
    lines = []
    for row in result["rows"]:
        milliseconds, by_class = row["step_ms"]["median"], row["us_by_class"]
        line = [row["kind"], row["batch"], row["context"], milliseconds, row["busy_us"] / 1e3, row["idle_percent"]]
        line += [row["idle_inside_percent"], row["idle_between_percent"], row["kernels_per_step"]]
        line += [row["bytes"] / 1e9, row["bytes"] / milliseconds / 1e9]
        lines.append([number(value) for value in [*line, *(by_class.get(label, 0.0) for label in classes)]])
    return markdown_table(header, lines)


def plain(result: Mapping[str, Any]) -> str:
    """A table for each list of rows, and one of what is there once: a column for each name, parts of a sum apart."""
    tables = []
    for section, rows in _sections(result):
        lines = [dict(_cells(row)) for row in rows]
        names = list(dict.fromkeys(name for line in lines for name in line))
        if names:
            table = markdown_table(names, [[number(line.get(name)) for name in names] for line in lines])
            tables.append(f"{section.replace('_', ' ')}:\n\n{table}" if section else table)
    return "\n\n".join(tables)


def _sections(result: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    sections: dict[str, list[Mapping[str, Any]]] = {}
    for section, row in rows_of(result):
        sections.setdefault(section or ("rows" if row in result.get("rows", ()) else ""), []).append(row)
    for section, rows in sections.items():
        yield "" if section == "rows" else section, rows


def _cells(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and "median" not in value:
            parts = [*value] if is_figure(name) else []
            yield from ((f"{title(name)} {part}", beside_measured(value, part)) for part in parts if part != "pairs")
        elif not isinstance(value, list):
            yield title(name) if is_figure(name) else name.replace("_", " "), value


def kernel_shares(result: Mapping[str, Any]) -> str:
    """One row for each kernel; cells are microseconds, the least possible ones, and the share of these."""
    if not all("of_floor" in row or "failed" in row for row in result["rows"]):  # before there were floors
        return plain(result)
    counts = sorted({row["T"] for row in result["rows"]})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in result["rows"]:
        cell = "failed"
        if "failed" not in row:
            times = (number(row[name]) for name in ("microseconds", "floor_microseconds"))
            cell = f"{' / '.join(times)}, {100 * row['of_floor']:.0f} %"
        lines.setdefault((row["model"], f"{row['family']}: {row['kernel']}", row["format"]), {})[row["T"]] = cell
    header = ["model", "kernel", "format", *(f"{T} row{'s' * (T > 1)}: µs / floor, share" for T in counts)]
    table = markdown_table(header, [[*case, *(cells.get(T, "-") for T in counts)] for case, cells in lines.items()])
    limits = {name: value for name, value in result.items() if name not in ("rows", "left_out")}
    left_out = "".join(f"\n\nNot there: {reason}." for reason in result.get("left_out", ()))
    return table + left_out + (f"\n\n{plain(limits)}" if limits else "")


TABLES = {"kernels": kernel_shares, "profile": _profile, "ablation": ablation, "quality": formats, "serve": _loads}
"""By kind of measurement; what is not here has plain ones."""
