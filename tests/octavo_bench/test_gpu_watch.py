"""What a driver says of its GPUs: a program in place of ``nvidia-smi``, which says the same as one on two GPUs."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path

import pytest

from octavo.cli import main
from octavo_bench.records.gpu_watch import GpuWatch

DRIVER = """#!/bin/sh
case "$*" in
*name,driver_version*)
    echo "NVIDIA H200, 580.82.07, 143771 MiB, 700.00 W"
    echo "NVIDIA H200, 580.82.07, 143771 MiB, 700.00 W" ;;
*index,utilization.gpu,utilization.memory,clocks.sm,clocks.mem,power.draw,memory.used,temperature.gpu*-lms*)
    echo "0, 100, 60, 1980, 3201, 650.5, 120000, 61"
    echo "1, 0, 0, 345, 3201, [N/A], 4, 30"
    echo "0, 50, 20, 1900, 3201, 450.5, 130000, 60"
    echo "1, 0, 0, 345, 3201, [N/A], 4, 30"
    echo "0, 99"
    exec sleep 60 ;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(DRIVER)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    close = GpuWatch.close

    def close_late(watch: GpuWatch) -> None:
        """Once all was said, however late that is."""
        while len(watch.samples) < 4:
            time.sleep(0.001)
        close(watch)

    monkeypatch.setattr(GpuWatch, "close", close_late)


@pytest.mark.usefixtures("driver")
def test_each_gpu_has_its_summary() -> None:
    start = time.monotonic()
    watch = GpuWatch()
    watch.close()
    first, second = watch.summary()
    assert first == {
        "gpu": 0,
        "samples": 2,
        "utilization_percent_mean": 75,
        "utilization_percent_max": 100,
        "memory_utilization_percent_mean": 40,
        "memory_utilization_percent_max": 60,
        "sm_mhz_median": 1940,
        "sm_mhz_min": 1900,
        "memory_mhz_median": 3201,
        "power_w_median": 550.5,
        "power_w_max": 650.5,
        "memory_mib_max": 130000,
        "temperature_c_max": 61,
    }
    assert second["utilization_percent_max"] == 0
    assert "power_w_max" not in second
    assert watch.since(start) == {name: value for name, value in first.items() if name != "gpu"}
    assert watch.since(time.monotonic()) == {}


@pytest.mark.usefixtures("driver")
def test_a_measurement_keeps_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, evidence = tmp_path / "trace.csv", tmp_path / "evidence"
    command = ["bench", "overhead", "--sequences", "4", "--prompt", "8", "--steps", "2000"]
    assert main([*command, "--gpu-trace", str(trace), "--evidence", str(evidence)]) == 0
    (first, _) = json.loads(capsys.readouterr().out)["result"]["gpus"]
    assert (first["utilization_percent_max"], first["samples"]) == (100, 2)
    lines = list(csv.DictReader(trace.open()))
    assert [line["gpu"] for line in lines] == ["0", "1", "0", "1"]
    assert (lines[0]["utilization_percent"], lines[0]["memory_mib"], lines[1]["power_w"]) == ("100", "120000", "")
    assert list(csv.DictReader((evidence / "gpu_trace.csv").open())) == lines


@pytest.mark.usefixtures("driver")
def test_the_trace_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "trace.svg"
    command = ["bench", "overhead", "--sequences", "4", "--prompt", "8", "--steps", "500", "--gpu-trace", str(plot)]
    assert main(command) == 0
    drawn = plot.read_text()
    assert all(text in drawn for text in ("utilisation, %", "memory in use, MiB", "power, W", "GPU 1"))


def test_a_trace_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "overhead", "--gpu-trace", str(tmp_path / "trace.csv")]) == 2
    assert "gpu_trace: nvidia-smi finds no GPU on this machine" in capsys.readouterr().err
    assert main(["bench", "overhead", "--gpu-trace", str(tmp_path / "trace.txt")]) == 2
    assert "gpu_trace: 'trace.txt' must end with .csv or .svg or .png" in capsys.readouterr().err


@pytest.mark.usefixtures("driver")
def test_only_gpus_that_programs_may_use_are_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(program.read_text().replace("case", f'echo "$*" >> {said}\ncase', 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    GpuWatch().close()
    assert [line.count("-i 1") for line in said.read_text().splitlines()] == [1, 1]
