"""What the driver says of the GPUs while something is measured: a figure taken at low clocks is another figure.

The driver's own program, ``nvidia-smi``, reads NVML and writes a line for each GPU at each interval.
"""

from __future__ import annotations

import contextlib
import csv
import math
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

MILLISECONDS = 500
"""Between samples; the driver itself averages utilisation over up to a second."""
STOP_SECONDS = 10
FIGURES = {
    "utilization.gpu": "utilization_percent",
    "utilization.memory": "memory_utilization_percent",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "power_w",
    "memory.used": "memory_mib",
    "temperature.gpu": "temperature_c",
}
"""Columns of ``nvidia-smi`` with the names and units they have here."""
SUMMARY: dict[str, dict[str, Callable[[Sequence[float]], float]]] = {
    "utilization_percent": {"mean": statistics.mean, "max": max},
    "memory_utilization_percent": {"mean": statistics.mean, "max": max},
    "sm_mhz": {"median": statistics.median, "min": min},
    "memory_mhz": {"median": statistics.median},
    "power_w": {"median": statistics.median, "max": max},
    "memory_mib": {"max": max},
    "temperature_c": {"max": max},
}


class GpuSample(NamedTuple):
    """What the driver said of one GPU at one time."""

    time: float
    """``time.monotonic()``"""
    gpu: int
    figures: dict[str, float]
    """By the names in ``FIGURES``; ``nan`` for what this GPU does not report."""


def gpus() -> list[str]:
    """Name, driver version and memory of each GPU; empty where there is no NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,driver_version,memory.total,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader", *_visible()]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.splitlines() if found.returncode == 0 else []


def _visible() -> list[str]:
    """The arguments for the GPUs that programs may use here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["-i", visible] if visible else []


class GpuWatch:
    """Utilisation, clocks, power, memory and temperature of every GPU that programs may use; nothing without one."""

    def __init__(self) -> None:
        self.samples: list[GpuSample] = []
        self.start = time.monotonic()
        """When the watch began."""
        self._process: subprocess.Popen[str] | None = None
        if gpus():
            query = f"--query-gpu=index,{','.join(FIGURES)}"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", *_visible(), "-lms", str(MILLISECONDS)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a line that is cut short
                index, *values = line.split(",")
                figures = dict(zip(FIGURES.values(), map(_number, values), strict=True))
                self.samples.append(GpuSample(time.monotonic(), int(index), figures))

    def since(self, start: float, gpu: int = 0) -> dict[str, float]:
        """Number of samples of a GPU from ``start`` (``time.monotonic()``) until now, with the means, medians and
        extremes in ``SUMMARY``; empty without samples."""
        rows = [sample.figures for sample in self.samples if sample.time >= start and sample.gpu == gpu]
        if not rows:
            return {}
        found: dict[str, float] = {"samples": len(rows)}
        for name, statistic in SUMMARY.items():
            if values := [row[name] for row in rows if not math.isnan(row[name])]:
                found |= {f"{name}_{kind}": round(compute(values), 1) for kind, compute in statistic.items()}
        return found

    def summary(self) -> list[dict[str, float]]:
        """``since`` the beginning, for each GPU."""
        return [{"gpu": gpu, **self.since(self.start, gpu)} for gpu in sorted({one.gpu for one in self.samples})]

    def write(self, path: Path) -> None:
        """Write all samples as CSV: seconds since the beginning, the GPU's index, and its figures."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["seconds", "gpu", *FIGURES.values()])
            for taken, gpu, figures in self.samples:
                shown = ("" if math.isnan(value) else f"{value:g}" for value in figures.values())
                lines.writerow([f"{taken - self.start:.3f}", gpu, *shown])

    def close(self) -> None:
        """Stop asking."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=STOP_SECONDS)
            self._reader.join(STOP_SECONDS)


def _number(text: str) -> float:
    """``nan`` for "[N/A]" and what else is there instead of a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
