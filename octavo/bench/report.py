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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("octavo", "torch", "numba", "numpy", "tokenizers", "fastapi", "uvicorn", "msgspec")


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, load, and the versions that matter."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _portable(argument: str) -> str:
    """The end of an absolute path: where this machine keeps things tells nobody else anything."""
    return "/".join(Path(argument).parts[-3:]) if Path(argument).is_absolute() else argument


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = next((line for line in lines if line.startswith("model name")), None)
    return found.partition(":")[2].strip() if found else platform.processor()


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


def publish(name: str, result: Mapping[str, Any], output: Path | None) -> None:
    """Print the result as JSON with where it comes from; also keep it in ``output`` when given."""
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["octavo", *map(_portable, sys.argv[1:])]),
        "machine": machine(),
        "result": result,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
