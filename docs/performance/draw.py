"""Draw the plots of performance.md from the records: ``python docs/performance/draw.py`` in the repository."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo_bench.records.gate import read_record
from octavo_bench.records.plot_style import COLOURS, GREY, drawing
from octavo_bench.records.plots import draw

PLOTS = Path(__file__).parent
RESULTS = PLOTS.parents[1] / "benchmarks" / "results"
NOTE = RESULTS.parent / "notes" / "comparisons.md"
RECORD = re.compile(r"\(\.\./results/(\S+\.json)\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
PANELS = {
    "output_tok_s": "output tokens/s",
    "ttft_p50_ms": "median time to first token",
    "itl_p99_ms": "99th percentile of ITL",
}
WORKLOADS = ("W1", "W2", "W3", "W4")
CPUS = {
    "Intel Sapphire Rapids": "cpu_peer_llama_cpp.json",
    "AMD Zen 5": "cpu_peer_llama_cpp_zen5.json",
    "AMD Zen 4": "cpu_peer_llama_cpp_amd.json",
    "AMD Zen 3, AVX2 alone": "cpu_peer_llama_cpp_avx2.json",
}
FIRST_MINUTE = "gpu/first_minute_qwen2.5-7b_h200.json"


class Line(NamedTuple):
    """A row of a plot: a model or a machine, and how many times better Octavo is, by figure and case."""

    label: str
    times: Mapping[tuple[str, str], float]


def of_gpus() -> Iterator[Line]:
    """The rows of the note's first table that have records."""
    for row in NOTE.read_text().partition("| W1:")[2].partition("\n\n")[0].splitlines():
        if found := RECORD.findall(row):
            gpu, model = [LINK.sub(r"\1", cell).strip(" *") for cell in row.split("|")[1:3]]
            yield Line(f"{re.sub(r' ?[(].*?[)]', '', model)}, {gpu}", times_better(found))


def times_better(records: list[str]) -> dict[tuple[str, str], float]:
    """By figure and workload, of the workloads that both engines have."""
    return {
        (row["figure"], row["workload"]): row["times_better"]
        for record in records
        for row in json.loads((RESULTS / record).read_text())["result"]["rows"]
        if "times_better" in row
    }


def of_cpus() -> Iterator[Line]:
    """Prefill and decoding next to llama.cpp."""
    for label, record in CPUS.items():
        rows = json.loads((RESULTS / record).read_text())["result"]["rows"]
        times = {("tokens/s", f"decode, {row['sequences']}"): row["decode_tok_s"]["ratio"] for row in rows}
        yield Line(label, {("tokens/s", "prompt, 1"): rows[0]["prefill_tok_s"]["ratio"], **times})


def dots(axes: Any, lines: list[Line], figure: str, cases: list[str], title: str) -> None:
    """A dot for each case on the line of its model; to the right of 1, Octavo is better."""
    for case, colour in zip(cases, COLOURS, strict=False):
        found = [(line.times[figure, case], place) for place, line in enumerate(lines) if (figure, case) in line.times]
        axes.plot(*zip(*found, strict=True), "o", color=colour, label=case)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(lines)), [line.label for line in lines])
    axes.set(title=title, xlabel="times better than the other engine", ylim=(len(lines) - 0.5, -0.5))


def plot(path: Path, heading: str, note: str, lines: list[Line], panels: Mapping[str, str], cases: list[str]) -> None:
    with drawing(path, heading, note, 3.0 + 3.2 * len(panels), 1.4 + 0.32 * len(lines)) as figure:
        places = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (name, title) in zip(places, panels.items(), strict=True):
            dots(axes, lines, name, cases, title)
        figure.legend(*places[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(cases))


def main(folder: Path = PLOTS) -> None:
    note = "From the records of benchmarks/notes/comparisons.md. Right of 1, Octavo is better."
    plot(folder / "gpu.svg", "Next to vLLM 0.22.1", note, list(of_gpus()), PANELS, list(WORKLOADS))
    cases = ["prompt, 1", "decode, 1", "decode, 4", "decode, 16"]
    heading = "Next to llama.cpp: SmolLM2-135M in Q4_1, two cores"
    plot(folder / "cpu.svg", heading, note, list(of_cpus()), {"tokens/s": "tokens/s"}, cases)
    draw(read_record(RESULTS / FIRST_MINUTE), folder / "first-minute.svg")


if __name__ == "__main__":
    main()
