"""A folder with everything that a measurement rests on: record, plot, environment, and the state of the code."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import octavo
from octavo.errors import ConfigError
from octavo_bench.records.gpu_watch import GpuWatch
from octavo_bench.records.report import portable_command

COMMANDS = {
    "cpu.txt": ["lscpu"],
    "gpu.txt": ["nvidia-smi", "-q"],
    "memory.txt": ["free", "-b"],
    "git.txt": ["git", "log", "-1", "--format=%H %cI"],
    "changes.patch": ["git", "diff", "HEAD"],
}
"""What is run for each file; what does not run here leaves none."""


def check_folder(folder: Path) -> None:
    """Raise ``ConfigError`` if a folder for evidence holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"evidence: {folder} is not an empty folder")


def write_evidence(record: Mapping[str, Any], folder: Path, watch: GpuWatch | None = None) -> None:
    """Fill the folder; ``watch``: what watched the GPUs meanwhile."""
    from octavo_bench.records.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "command.txt").write_text(portable_command(["octavo", *sys.argv[1:]]) + "\n")
    packages = sorted({f"{one.metadata['Name']}=={one.version}" for one in distributions()}, key=str.lower)
    lines = [f"python {platform.python_version()}", platform.platform(), *packages]
    (folder / "packages.txt").write_text("\n".join(lines) + "\n")
    for name, command in COMMANDS.items():
        if output := _output(command):
            (folder / name).write_text(output)
    if watch is not None and watch.samples:
        write_trace(watch, folder / "gpu_trace.csv")
    if find_spec("matplotlib") is not None:
        try:
            draw(record, folder / "plot.svg")
        except ConfigError as error:  # a record without figures
            print(f"octavo: {error}", file=sys.stderr)


def write_trace(watch: GpuWatch, path: Path) -> None:
    """Write what the driver said of the GPUs: as a table, or drawn over time if ``path`` ends like a plot."""
    if path.suffix == ".csv":
        watch.write(path)
    else:
        from octavo_bench.records.plots import draw_gpus

        draw_gpus(watch, path)


def _output(command: list[str]) -> str:
    try:
        source = Path(octavo.__file__).parent
        return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
