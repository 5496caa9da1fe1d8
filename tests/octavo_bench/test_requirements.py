"""Measurements that need a GPU or a package say so."""

from __future__ import annotations

import sys

import pytest
import torch

from octavo.cli import main
from octavo_bench.cli import arguments


@pytest.mark.parametrize("measurement", ["kernels", "recurrences"])
@pytest.mark.parametrize(
    ("has_device", "error"),
    [
        (False, "there is no CUDA device here"),
        (True, "the package triton is not installed; `pip install triton` installs it"),
    ],
)
def test_what_a_measurement_of_a_gpu_lacks_is_said_in_a_line(
    measurement: str,
    has_device: bool,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    for name in ("octavo_bench.device.kernels", "octavo_bench.device.recurrences"):
        monkeypatch.setitem(sys.modules, name, None)  # importing these without triton is a traceback
    assert main(["bench", measurement]) == 2
    assert capsys.readouterr().err == f"octavo: error: bench {measurement}: {error}\n"
