"""Everything that is tested and measured on a GPU, in one command and in bounded time.

Each stage is a process of its own. One that fails or takes too long does not keep the others from running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo_bench.report import machine

OCTAVO = (sys.executable, "-m", "octavo")
STOP_SECONDS = 20.0
"""What a stage that watches its own deadline gets to end within the time of all."""


class GpuStage(NamedTuple):
    """A command with the most seconds it may take."""

    command: tuple[str, ...]
    seconds: float


def stages(folder: Path, model: str, python_path: str | None, seconds: float) -> dict[str, GpuStage]:
    """Every stage by name, in order; the last one, beside the peer, takes the time that is left."""

    def bench(kind: str, *arguments: str) -> tuple[str, ...]:
        return (*OCTAVO, "bench", kind, *arguments, "--output", str(folder / f"{kind}.json"))

    peer = ("--engine", "vllm", *(("--python-path", python_path) if python_path else ()))
    return {
        "tests": GpuStage((sys.executable, "-m", "pytest", "-q", "tests/gpu"), 150),
        "ceilings": GpuStage(bench("ceilings"), 60),
        "kernels": GpuStage(bench("kernels"), 90),
        "throughput": GpuStage(bench("throughput", model, "--rounds", "3"), 120),
        "profile": GpuStage(bench("profile", model), 120),
        "peer": GpuStage(bench("peer", model, *peer, "--deadline", str(seconds)), seconds),
    }


def run_stages(folder: Path, model: str, wanted: Sequence[str] | None, deadline: float, python_path: str | None) -> int:
    """Run the stages until ``deadline`` seconds have passed; 0 when all succeeded, else 1.

    ``folder`` gets each stage's raw JSON, ``logs.txt`` with what all of them said, and ``summary.json``. Raises
    ``ConfigError`` for a stage that does not exist.
    """
    known = stages(folder, model, python_path, 0)
    for name in wanted or ():
        if name not in known:
            raise ConfigError(f"stages: {name!r} is not one of {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + deadline
    done: dict[str, Any] = {}
    with (folder / "logs.txt").open("wb") as log:
        for name in wanted or known:
            left = end - time.monotonic()
            stage = stages(folder, model, python_path, max(left - STOP_SECONDS, 1))[name]
            log.write(f"===== {name}: {' '.join(stage.command)}\n".encode())
            log.flush()
            done[name] = _run(stage, left, log)
            print(f"{name}: {done[name]['outcome']} after {done[name]['seconds']} s", file=sys.stderr)
            summary = {"machine": machine(), "model": Path(model).name, "stages": done}
            (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if all(stage["outcome"] == "done" for stage in done.values()) else 1


def _run(stage: GpuStage, left: float, log: Any) -> dict[str, Any]:
    start = time.monotonic()
    if left < STOP_SECONDS:
        return {"outcome": "no time was left", "seconds": 0}
    process = subprocess.Popen(stage.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(min(stage.seconds + STOP_SECONDS, left))
        outcome = "done" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        outcome = "took too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {"outcome": outcome, "seconds": round(time.monotonic() - start, 1)}
