"""Which backend a type of device has, and that the engine needs nothing of it but plain torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams, plugins
from octavo.ops.device_backend import DeviceBackend, backend_of
from octavo.plugins import CPU, GPU, KERNELS
from octavo_kernels import triton
from octavo_kernels.cpu.backend import BACKEND as OF_CPUS
from octavo_kernels.triton.backend import BACKEND as OF_GPUS
from tests.llm.tiny import SETTINGS, write_checkpoint
from tests.test_architecture import ROOT


class OfOneMaker(DeviceBackend):
    """One that another distribution has, for some GPUs."""

    reason: str | None = None

    def declines(self) -> str | None:
        return self.reason


ELSEWHERE = OfOneMaker()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[OfOneMaker]:
    entry = EntryPoint("cuda.elsewhere", f"{__name__}:ELSEWHERE", KERNELS)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == KERNELS else [])
    monkeypatch.setattr(ELSEWHERE, "reason", None)
    for cached in (plugins.parts, backend_of):
        cached.cache_clear()
    yield ELSEWHERE
    for cached in (plugins.parts, backend_of):
        cached.cache_clear()


def test_backends_of_this_distribution() -> None:
    assert backend_of(CPU) is OF_CPUS
    assert backend_of(GPU) is OF_GPUS
    assert type(backend_of("meta")) is DeviceBackend


def test_a_backend_of_another_distribution_is_asked_first(elsewhere: OfOneMaker) -> None:
    assert backend_of(GPU) is elsewhere
    assert backend_of(CPU) is OF_CPUS


def test_a_backend_that_declines_leaves_the_next(elsewhere: OfOneMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "reason", "there is no such GPU")
    assert backend_of(GPU) is OF_GPUS


def test_without_kernels_a_device_has_torch_alone() -> None:
    plain = DeviceBackend()
    plain.load_kernels()
    assert plain.recorder() is None
    assert plain.compiled_only() is None
    assert plain.tuner(lambda: None, torch.device("cpu")) is None
    for block in (plain.launched_early(), plain.batch_invariant(), plain.without_grid_barriers()):
        with block:
            pass


PROGRAM = """
import sys
from octavo import LLM, SamplingParams, plugins

plugins.OWN = {**plugins.OWN, plugins.KERNELS: {plugins.CPU: "tests.ops.test_device_backend:PLAIN"}}
with LLM(sys.argv[1], **%r) as llm:
    kernels = set(llm.info.kernels.values())
    [output] = llm.generate(["a text"], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    print(kernels == {"reference"}, output.outputs[0].token_ids)
"""
PLAIN = DeviceBackend()


def test_an_engine_runs_on_the_reference_alone(tmp_path: Path) -> None:
    """What a port to a new device has before its first kernel."""
    folder = write_checkpoint(tmp_path / "tiny")
    command = [sys.executable, "-c", PROGRAM % SETTINGS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    with LLM(folder, **SETTINGS) as llm:
        [output] = llm.generate(["a text"], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert done.stdout.strip() == f"True {output.outputs[0].token_ids}"


def test_kernels_for_any_gpu_need_no_file_of_one_kind_of_gpu() -> None:
    """They import those late, where ``has_gluon`` says so; but for modules that only choose."""
    for path in Path(triton.__file__).parent.rglob("*.py"):
        assert "triton.experimental" not in path.read_text(), path
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo_kernels.hopper."):
                module = ROOT / f"{str(node.module).replace('.', '/')}.py"
                assert "triton.experimental" not in module.read_text(), f"{path.name}:{node.lineno}"


def test_the_name_of_gpus_is_written_once() -> None:
    """As code, outside the kernels for them; ``octavo.plugins.GPU`` everywhere else."""
    for package in ("octavo", "octavo_server", "octavo_fleet"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and node.value == GPU:
                    assert path == ROOT / "octavo/plugins.py", f"{path}:{node.lineno}"
