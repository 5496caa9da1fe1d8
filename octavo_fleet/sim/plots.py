"""Plots of a simulation; needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

LATENCIES = ("ttft", "itl", "tpot", "e2el")


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Write a PNG with the queue over time and the percentiles. Raises ``ConfigError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: needs matplotlib; pip install octavo[plots]") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    queue, latency = figure.subplots(1, 2)
    seconds = [point["second"] for point in figures["queue"]]
    for name in ("waiting", "running"):
        queue.plot(seconds, [point[name] for point in figures["queue"]], label=name)
    queue.set(xlabel="seconds", ylabel="requests", title="queue")
    queue.legend()
    for percent in ("p50", "p90", "p99"):
        latency.plot(LATENCIES, [figures[name][percent] for name in LATENCIES], "o", label=percent)
    latency.set(yscale="log", ylabel="seconds", title="latency")
    latency.legend()
    figure.savefig(path, format="png")
