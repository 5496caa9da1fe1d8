"""``octavo tune``: what it asks of the engine and what it says; the measuring itself is tested with the kernels."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo.build.build_engine
import octavo.build.device_settings
from octavo.cli import EXIT_ERROR, main
from octavo.config import FULL, EngineConfig, ModelSettings
from octavo.engine.runner.kernel_tuning import TuningPlan


class FakeEngine:
    closed = 0

    def close(self) -> None:
        FakeEngine.closed += 1


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TuningPlan]:
    """The plans with which engines are built, on a GPU that is not there."""
    pytest.importorskip("triton")
    from octavo_kernels.triton import config_tables

    found: list[TuningPlan] = []

    def build_engine(config: EngineConfig, tuning: TuningPlan) -> tuple[FakeEngine, Any]:
        found.append(tuning)
        tuning.report(0.5, "96x64, 16")
        tuning.report(1.0, "64x96, 16")
        return FakeEngine(), None

    monkeypatch.setattr(octavo.build.build_engine, "build_engine", build_engine)
    monkeypatch.setattr(octavo.build.device_settings, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(config_tables, "_driver_version", lambda: "1.2")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    return found


def test_it_measures_everything_without_a_limit(plans: list[TuningPlan], capsys: pytest.CaptureFixture[str]) -> None:
    before = FakeEngine.closed
    assert main(["tune", "some/model"]) == 0
    assert [(plan.seconds, plan.again) for plan in plans] == [(float("inf"), True)]
    assert FakeEngine.closed == before + 1
    said = capsys.readouterr().err
    assert "64x96, 16 rows" in said
    assert "kernels for NVIDIA Test are in " in said
    assert "NVIDIA_Test-1.2-triton" in said.replace("\n", "")


def test_what_it_compiled_can_be_written_to_a_file_and_added_to(
    plans: list[TuningPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, models, build = tmp_path / "kernels.zip", list[ModelSettings](), octavo.build.build_engine.build_engine

    def build_engine(config: EngineConfig, tuning: TuningPlan) -> Any:
        models.append(config.model)
        folder = Path(os.environ["TRITON_CACHE_DIR"]) / (52 * "A")
        folder.mkdir()
        (folder / "kernel.cubin").write_text("code")
        return build(config, tuning=tuning)

    monkeypatch.setattr(octavo.build.build_engine, "build_engine", build_engine)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "of other programs"))
    for _ in range(2):
        assert main(["tune", "some/model", "--export", str(path)]) == 0
    assert [(model.warmup, model.kernel_cache) for model in models] == [(FULL, None), (FULL, str(path))]
    assert zipfile.ZipFile(path).namelist() == ["key.json", "measured.json", f"cache/{52 * 'A'}/kernel.cubin"]
    assert f"1 files of compiled kernels are in {path}" in capsys.readouterr().err.replace("\n", "")
    assert main(["tune", "some/model", "--export", str(tmp_path / "no" / "kernels.zip")]) == EXIT_ERROR
    assert "there is no folder" in capsys.readouterr().err


def test_batch_invariance_has_nothing_to_tune(plans: list[TuningPlan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "some/model", "--batch-invariant"]) == EXIT_ERROR
    assert "do not depend on measurements" in capsys.readouterr().err
    assert plans == []


def test_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "some/model", "--device", "cpu"]) == EXIT_ERROR
    assert "torch finds none here" in capsys.readouterr().err
