"""What kernels take on GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.models.registry import ARCHITECTURES, read_config
from tests.octavo_bench.size_runs import HEADS, default_config
from tests.triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there its own kernels are compiled")


def test_default_sizes_of_each_family_are_read() -> None:
    """Those of transformers, which also writes some keys in other ways than published checkpoints have them."""
    configs = filter(None, map(default_config, ARCHITECTURES))
    assert sum(read_config(config).num_layers > 0 for config in configs) > 80


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["", *(f"heads of {width}" for width in HEADS)])
def test_no_size_is_refused_on_a_gpu(compiled: str, tmp_path: Path) -> None:
    """Neither of a family nor of a checkpoint with others, by launchers; compiled are heads of each width."""
    command = [sys.executable, "-m", "tests.octavo_bench.size_runs", *filter(None, [compiled])]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FAILED" not in done.stdout, done.stdout
    assert int(done.stdout.split()[-2]) >= (1 if compiled else 150)


@pytest.mark.nightly
@pytest.mark.slow
def test_kernels_of_wide_heads_fit_gpus_with_little_shared_memory(tmp_path: Path) -> None:
    """Of most GPUs of compute capability 8.6, 8.9 and 12.0 a program may have 99 KiB."""
    command = [sys.executable, "-m", "octavo_bench.kernel_resources", "gemma-3-4b", "--gpu", "l40s"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*command, "--steps", "16 sequences", "prompt"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("prefill", "decode", "rms_norm", "skinny"):
        assert f" {kernel} " in done.stdout
    assert "cannot run" not in done.stdout
