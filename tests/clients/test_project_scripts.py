"""The clients of other projects that are no packages: scripts in clones of their repositories, unmodified.

``make test-clients PROJECTS=FOLDER`` names the folder of the clones, each with the name of its repository; what is not
there is skipped.
"""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, program_of
from tests.conftest import Server, start_server

PROJECTS = os.environ.get("OCTAVO_PROJECTS", "")
LOAD_TESTS_PORT = 8000
"""A constant in the load tests of llm-inference-engine."""


def run_script(name: str, *arguments: object, cwd: Path, python: str | Path = sys.executable, **env: str) -> str:
    """Run a script to its end; returns what it printed. Skips when its project is not there."""
    script = Path(PROJECTS or "/nonexistent") / name
    if not script.is_file():
        pytest.skip(f"there is no clone with {name}; give its folder: make test-clients PROJECTS=FOLDER")
    command = [str(python), str(script.resolve()), *map(str, arguments)]
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


def test_the_example_and_the_tests_of_the_engine_of_llm_inference_engine(tmp_path: Path) -> None:
    """Unmodified, where a module of the name ``llm_engine`` has Octavo's names of it."""
    (tmp_path / "llm_engine.py").write_text("from octavo_fleet.llm_engine import *\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    shown = run_script("LLM-INFERENCE-ENGINE/examples/run_engine.py", cwd=tmp_path, PYTHONPATH=path)
    tokens = re.findall(r"(chat-\d) token=(\d+)", shown)
    assert [token for name, token in tokens if name == "chat-1"] == ["27287", "27712", "3182", "15677"]
    assert [token for name, token in tokens if name == "chat-2"] == ["24197", "20317", "18062"]
    assert "OK" in run_script("LLM-INFERENCE-ENGINE/tests/test_engine.py", cwd=tmp_path, PYTHONPATH=path)


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


@pytest.fixture(scope="module")
def server_8000() -> Iterator[Server]:
    """Another server of `make serve`, on the port that the load tests ask."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", LOAD_TESTS_PORT)) == 0:
            pytest.skip(f"port {LOAD_TESTS_PORT} is taken")
    server = start_server(MODEL, "--port", str(LOAD_TESTS_PORT))
    yield server
    server.stop()


@pytest.mark.parametrize("prompt", ["short", "medium", "long"])
def test_the_load_test_of_llm_inference_engine(server_8000: Server, tmp_path: Path, prompt: str) -> None:
    report, levels = tmp_path / "report.json", (1, 4, 8)
    run_script(
        *("llm-inference-engine/benchmarks/load/load_test.py", "--concurrency", *levels),
        *("--prompt", prompt, "--out", report),
        cwd=tmp_path,
        python=program_of("main", "python"),
    )
    found = json.loads(report.read_text())
    assert [(row["total_requests"], row["failed"]) for row in found] == [(level, 0) for level in levels]
    alone = found[0]["total_tokens"]
    assert 0 < alone <= 50
    assert [row["total_tokens"] for row in found] == [alone * level for level in levels]  # decoding is greedy
    assert server_8000.get("/stats").json()["cache"]["used_pages"] == 0


def test_the_arrival_patterns_of_llm_inference_engine(server_8000: Server, tmp_path: Path) -> None:
    """It imports ``pynvml``; without a GPU its figures of utilisation are empty."""
    report = tmp_path / "report.json"
    run_script(
        *("llm-inference-engine/benchmarks/load/load_v.py", "--num_requests", 8),
        *("--poisson_rate", 4, "--steady_interval", 0.3, "--out", report),
        cwd=tmp_path,
        python=program_of("main", "python"),
    )
    found = json.loads(report.read_text())
    assert [row["pattern"] for row in found] == ["burst", "steady", "poisson"]
    assert [(row["total_requests"], row["failed"]) for row in found] == [(8, 0)] * 3
    assert server_8000.get("/stats").json()["cache"]["used_pages"] == 0
