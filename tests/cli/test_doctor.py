"""`octavo doctor`: every section, with and without a model, and problems in the output and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import octavo
from octavo.cli import main
from octavo.cli.doctor import QUANTITIES
from octavo_kernels.cpu.compiled import cache_folder
from tests.llm.tiny import SETTINGS, write_checkpoint

FLAGS = [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), str(value))]
SECTIONS = ["versions", "machine", "models", "model", "kernels"]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without models. The folder of compiled kernels does not change: it is resolved once per process."""
    cache_folder()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sections(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("  "):
            found[title] += line + "\n"
        else:
            title = line
            found[title] = ""
    return found


def test_without_a_model_it_fetches_nothing(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    found = sections(capsys.readouterr().out)
    assert list(found) == SECTIONS
    assert f"octavo              {octavo.__version__}\n" in found["versions"]
    assert f"torch               {torch.__version__}\n" in found["versions"]
    assert str(empty_cache) in found["models"]
    assert "not downloaded yet" in found["models"]
    assert "not loaded" in found["model"]
    assert not empty_cache.exists()


def test_every_op_names_the_kernel_that_runs_and_why_the_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dtype", "float32", "--device", "cpu"]) == 0
    found = sections(capsys.readouterr().out)["kernels"]
    assert "for float32 on cpu" in found
    lines = [line.split(maxsplit=2) for line in found.splitlines()[1:]]
    ops = {name for name, _, _ in lines}
    assert {"rms_norm", "attention", "block_linear", "linear"} <= ops
    for name in ops:
        assert [verdict for op, _, verdict in lines if op == name].count("runs") == 1
    assert all(verdict for _, _, verdict in lines)


def test_a_model_shows_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(write_checkpoint(tmp_path)), *FLAGS]) == 0
    found = sections(capsys.readouterr().out)["model"]
    assert "LlamaForCausalLM" in found
    assert "64 blocks of 16 tokens" in found
    for purpose in ("weights", "kv cache", "activations", "in all"):
        assert purpose in found


def test_a_model_that_cannot_be_loaded_is_a_problem_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path / "none.gguf")]) == 1
    found = sections(capsys.readouterr().out)
    assert "PROBLEM: model: " in found["model"]
    assert list(found) == SECTIONS
    assert "runs" in found["kernels"]


def test_a_device_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert main(["doctor", "--device", "cuda"]) == 1
    assert "PROBLEM: device: " in sections(capsys.readouterr().out)["machine"]


def measured(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    for name, value in values.items():
        known = QUANTITIES[name.replace("_", "-")]
        monkeypatch.setitem(QUANTITIES, name.replace("_", "-"), known._replace(measure=lambda value=value: value))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("requirements", "code"),
    [
        (["memory:8", "gpus:1", "load:1.5"], 0),
        (["memory:8.5", "gpus:1"], 1),
        (["gpus:2"], 1),
        (["load:0.5", "memory:1"], 1),
        (["gpu-utilization:5"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_requirements_decide_the_exit_code(
    requirements: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, memory=8.25, gpus=1, load=1.0, gpu_utilization=5)
    assert main(["doctor", "--device", "cpu", "--check", *requirements]) == code
    found = sections(capsys.readouterr().out)
    assert list(found) == [*SECTIONS, "checks"]
    assert found["checks"].count("ok (") == len(requirements) - code
    assert found["checks"].count("NOT MET") == found["checks"].count("PROBLEM: check: ") == code


def test_what_the_machine_has_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    met = ["cores:1", "memory:0.01", "disk:0.001", "load:1000", "gpus:0", "gpu-memory:0"]
    assert main(["doctor", "--device", "cpu", "--check", *met]) == 0
    lines = sections(capsys.readouterr().out)["checks"].splitlines()
    assert [line.split()[0] for line in lines] == [text.split(":")[0] for text in met]
    assert all(float(line.split()[1].rstrip(",")) >= 0 for line in lines)


def test_a_gpu_that_nobody_knows_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["doctor", "--device", "cpu", "--check", "gpu-utilization:10"]) == 1
    assert "PROBLEM: check: gpu-utilization: nvidia-smi does not tell it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [("vram:3", "'vram' is not one of cores, load"), ("memory", "not NAME:NUMBER"), ("disk:-1", "must be finite")],
)
def test_requirements_are_checked_first(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--check", text]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out
