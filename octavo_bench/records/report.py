"""What a measurement is worth: its figures, and everything needed to take it again."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.system.cpus import processor_name
from octavo_bench.records.figure_table import Better
from octavo_bench.records.gpu_watch import gpus

Say = Callable[[str], None]
"""Tells a person who waits."""
PACKAGES = ("torch", "triton", "numba", "numpy", "tokenizers", "uvicorn", "msgspec")


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, load, and the versions that matter."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "gpus": gpus(),
        "versions": {"octavo": __version__, **{name: _version(name) for name in PACKAGES}},
    }


def _portable(argument: str) -> str:
    return "/".join(Path(argument).parts[1:][-3:]) if Path(argument).is_absolute() else argument


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median with minimum and maximum, so that a reader sees how noisy the figure is."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": len(values),
    }


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """``spread`` of each figure over runs that all have it."""
    return {name: spread([run[name] for run in runs]) for name in runs[0]}


def beside(pairs: Sequence[tuple[float, float]], digits: int, better: Better = "more") -> dict[str, Any]:
    """Medians of our figure and a peer's, and of how many times better ours is, pair by pair."""
    ratios = [ours / theirs if better == "more" else theirs / ours for ours, theirs in pairs]
    return {
        "octavo": round(statistics.median(ours for ours, _ in pairs), digits),
        "peer": round(statistics.median(theirs for _, theirs in pairs), digits),
        "ratio": round(statistics.median(ratios), 2),
        "pairs": [[round(ours, digits), round(theirs, digits)] for ours, theirs in pairs],
    }


def keep(name: str, result: Mapping[str, Any], output: Path | None) -> str:
    """The result as JSON with where it comes from; also written to ``output`` when given.

    Results that grow are kept after each part, so that what is cut short leaves its last.
    """
    text = json.dumps(_record(name, result), indent=2)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    return text


def portable_command(arguments: Sequence[str]) -> str:
    """A command line to show: of absolute paths only the end, for where this machine keeps things tells nobody else."""
    return shlex.join(map(_portable, arguments))


def _program() -> list[str]:
    """How this program is started: ``octavo``, or a module of the laboratory."""
    started = Path(sys.argv[0])
    return ["python", "-m", f"octavo_bench.{started.stem}"] if started.parent.name == "octavo_bench" else ["octavo"]


def _record(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "command": portable_command([*_program(), *sys.argv[1:]]),
        "machine": machine(),
        "result": result,
    }
