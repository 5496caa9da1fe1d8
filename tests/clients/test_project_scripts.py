"""The clients of other projects that are no packages: scripts in clones of their repositories, unmodified.

``make test-clients PROJECTS=FOLDER`` names the folder of the clones, each with the name of its repository; what is not
there is skipped.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.conftest import Server

PROJECTS = os.environ.get("OCTAVO_PROJECTS", "")


def run_script(name: str, *arguments: object, cwd: Path, **env: str) -> str:
    """Run a script to its end; returns what it printed. Skips when its project is not there."""
    script = Path(PROJECTS or "/nonexistent") / name
    if not script.is_file():
        pytest.skip(f"there is no clone with {name}; give its folder: make test-clients PROJECTS=FOLDER")
    command = [sys.executable, str(script.resolve()), *map(str, arguments)]
    ended = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
    return ended.stdout


def test_the_bench_of_inferengine(server: Server, tmp_path: Path) -> None:
    shown = run_script(
        "InferEngine/scripts/bench.py", *("--url", server.url, "-n", 16, "-c", 8, "--tokens", 20), cwd=tmp_path
    )
    assert "requests=16 concurrency=8 generated_tokens=320" in shown
    assert re.search(r"max_batch_observed=[1-8]\b", shown)
    assert "cache_used_pages=0 " in shown


def test_the_demo_of_inferengine(server: Server, tmp_path: Path) -> None:
    shown = run_script("InferEngine/scripts/demo.py", cwd=tmp_path, BASE=server.url)
    assert shown.count("tokens=24 ") == 3
    stats = ast.literal_eval(shown.strip().splitlines()[-1])
    assert stats["cache"]["used_pages"] == 0


@pytest.mark.parametrize("workload", ["baseline", "prefix_caching"])
def test_the_serving_benchmark_of_infer(server: Server, tmp_path: Path, workload: str) -> None:
    report = tmp_path / "report.json"
    run_script(
        *("infer/benchmarks/bench_serving.py", "--server", f"{server.url}/infer", "--model", MODEL),
        *("--workload", workload, "--num-requests", 4, "--warmup-requests", 1, "--output", report),
        cwd=tmp_path,
    )
    (found,) = json.loads(report.read_text())["workloads"]
    assert (found["successful_requests"], found["failed_requests"]) == (4, 0)
